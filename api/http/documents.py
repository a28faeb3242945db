"""An app's OpenAPI document, and pages for it, as routes of the table.

FastAPI writes them, and is imported by the first who asks for one: it takes as long as all else that a server imports.
"""

import asyncio
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

from starlette.responses import JSONResponse, Response

OPENAPI = "/openapi.json"


class Operation(NamedTuple):
    """A method of a route, and what the document tells of it."""

    method: str
    template: str
    name: str
    told: dict[str, Any]


def described(title: str, operations: Iterable[Operation]) -> dict[str, Any]:
    """The document of these operations."""
    from fastapi import FastAPI
    from fastapi.openapi.utils import get_openapi

    app = FastAPI(openapi_url=None)
    for method, template, name, told in operations:
        app.add_api_route(template, named(name), methods=[method], openapi_extra=told)
    return get_openapi(title=title, version=version("warmroute"), routes=app.routes)


def named(name: str) -> Callable[[], None]:
    """A function of this name, whose text FastAPI would take for a description."""

    def endpoint() -> None: ...

    endpoint.__name__ = name
    return endpoint


# Each is made on a thread, since the first one imports so much.


async def docs(title: str) -> Response:
    def make() -> Response:
        from fastapi.openapi.docs import get_swagger_ui_html

        return get_swagger_ui_html(openapi_url=OPENAPI, title=title)

    return await asyncio.to_thread(make)


async def redoc(title: str) -> Response:
    def make() -> Response:
        from fastapi.openapi.docs import get_redoc_html

        return get_redoc_html(openapi_url=OPENAPI, title=title)

    return await asyncio.to_thread(make)


async def openapi(make: Callable[[], dict[str, Any]]) -> Response:
    return JSONResponse(await asyncio.to_thread(make))
