"""An app's OpenAPI document, and a page for it, as routes of the table.

FastAPI writes them, and is imported by the first who asks for one: it takes as long as all else that a server imports.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any, NamedTuple

from starlette.responses import JSONResponse, Response

from api.errors import not_found

OPENAPI = "/openapi.json"
FILES = "/docs/files/{file}"
TYPES = {"css": "text/css", "js": "text/javascript", "png": "image/png"}
# The page has scripts and styles of its own.
ONLY_FROM_HERE = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; object-src 'none'"
    )
}
SUMMARIES = {  # a router's or a replica's document shows them beside its routes
    "POST /v1/chat/completions": "Answer a conversation, as OpenAI's API does",
    "POST /v1/completions": "Continue a text, as OpenAI's API does",
    "POST /v1/messages": "Answer a conversation, as Anthropic's API does",
    "POST /v1/messages/count_tokens": "Count the tokens of a conversation, as Anthropic's API does",
    "POST /v1/responses": "Answer a conversation, as OpenAI's Responses API does",
    "GET /v1/responses/{response_id}": "Read a stored response",
    "DELETE /v1/responses/{response_id}": "Forget a stored response",
    "GET /v1/models": "List the models",
    "GET /v1/models/{model:path}": "Describe a model",
    "POST /v1/load_lora_adapter": "Load a LoRA adapter",
    "POST /v1/unload_lora_adapter": "Unload a LoRA adapter",
    "POST /tokenize": "Cut a prompt into tokens",
    "POST /detokenize": "Turn tokens into text",
    "GET /tokenizer_info": "Show the special tokens and the chat template",
    "GET /health": "Tell whether the process lives",
    "GET /ready": "Tell whether requests are answered, or why not",
    "GET /metrics": "Show metrics for Prometheus",
    "GET /version": "Show the version of warmroute",
    "GET /load": "Show the replica's load, its cache and its event sockets",
    "GET /usage": "Show requests and tokens by day, key and model",
    "GET /replicas": "List the replicas with their state, cache and load",
    "POST /replicas": "Add a replica",
    "DELETE /replicas/{name}": "Remove a replica that was added",
    "POST /replicas/{name}/drain": "Send a replica no new requests",
    "POST /replicas/{name}/undrain": "Send a replica requests again",
    "POST /replicas/{name}/resync": "Read a replica's whole cache again",
    "POST /reset_prefix_cache": "Clear the prefix caches",
    "POST /explain": "Show where a request would go, and why",
    "GET /decisions": "List the last decisions",
    "GET /decisions/{request_id:path}": "Show one decision",
    "GET /sessions": "Show the sessions that wait to begin, and the last ones that had a turn",
    "GET /prefixes": "Show what recent prompts share, and which replicas hold it",
    "GET /debug/index": "Show the sizes of all that can grow",
    "GET /dashboard/replicas/{name}": "Show a replica as its page of the dashboard does",
}


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
        summary = SUMMARIES[f"{method} {template}"]
        app.add_api_route(template, named(name), methods=[method], summary=summary, openapi_extra=told)
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

        return get_swagger_ui_html(
            openapi_url=_beside(OPENAPI),
            title=title,
            swagger_js_url=_file("swagger-ui-bundle.js"),
            swagger_css_url=_file("swagger-ui.css"),
            swagger_favicon_url=_file("favicon.png"),
        )

    page = await asyncio.to_thread(make)
    page.headers.update(ONLY_FROM_HERE)
    return page


async def file(name: str, path: str) -> Response:
    """A file of this page; 404 for the path if there is none."""
    content = (await asyncio.to_thread(_files)).get(name)
    if content is None:
        raise not_found(path)
    headers = {"Cache-Control": "max-age=3600", "X-Content-Type-Options": "nosniff"}
    return Response(content, headers=headers, media_type=TYPES[name.rpartition(".")[2]])


@cache
def _files() -> dict[str, bytes]:
    """All files, read once: a request's path is never used on the file system."""
    entries = (files("fastapi_offline") / "static").iterdir()
    return {entry.name: entry.read_bytes() for entry in entries if entry.name.rpartition(".")[2] in TYPES}


def _file(name: str) -> str:
    return _beside(FILES.replace("{file}", name))


def _beside(path: str) -> str:
    """The path as a page at the root finds it, also behind a proxy's prefix."""
    return path.removeprefix("/")


async def openapi(make: Callable[[], dict[str, Any]]) -> Response:
    return JSONResponse(await asyncio.to_thread(make))
