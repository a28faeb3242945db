"""Pages for an app's OpenAPI document as routes of the table, which FastAPI's own would bypass."""

from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

OPENAPI = "/openapi.json"


def docs(title: str) -> Response:
    return get_swagger_ui_html(openapi_url=OPENAPI, title=title)


def redoc(title: str) -> Response:
    return get_redoc_html(openapi_url=OPENAPI, title=title)


def openapi(request: Request) -> Response:
    return JSONResponse(request.app.openapi())
