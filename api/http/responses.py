"""Errors and small answers as responses."""

from typing import Any

import msgspec
from starlette.responses import Response

from api.errors import ApiError
from api.generation_apis import error_body

JSON_TYPE = "application/json"


def error_response(error: ApiError, path: str = "") -> Response:
    """The error in the shape of the API at this path."""
    return Response(error_body(error, path), error.status, error.headers, JSON_TYPE)


def json_response(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type=JSON_TYPE)
