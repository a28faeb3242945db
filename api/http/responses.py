"""Errors and small answers as responses."""

from typing import Any

import msgspec
from starlette.responses import Response

from api.errors import ApiError

JSON_TYPE = "application/json"


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, JSON_TYPE)


def json_response(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type=JSON_TYPE)
