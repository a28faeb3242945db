"""Error answers, and which of them count as refused requests."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, internal
from api.generation_apis import PATHS
from api.http.responses import error_response
from replica.http.engine_client import EngineDied
from replica.http.metrics import Metrics


def unavailable(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, "service_unavailable", code=code, headers={"Retry-After": str(retry_after_s)})


def refusal(error: ApiError) -> str | None:
    """The label in /metrics; None for failures, which are not refusals."""
    match error.status:
        case 429:
            return "full"
        case 413:
            return "too_long"
        case 400 if error.code == CONTEXT_LENGTH_EXCEEDED:
            return "too_long"
        case 503 if error.code in ("draining", "loading"):
            return error.code
        case 400 | 404:  # 404: a model that is not served here
            return "invalid"
    return None


def error_answers(metrics: Metrics) -> dict[type[Exception], Any]:
    """Functions that answer a request which raised an exception of a type."""

    async def api_error(request: Request, error: ApiError) -> Response:
        reason = refusal(error)
        if reason is not None and request.scope["path"] in PATHS:
            metrics.refused[reason] += 1
        return error_response(error, request.scope["path"])

    async def routing_error(request: Request, error: HTTPException) -> Response:
        return error_response(ApiError(error.status_code, str(error.detail)), request.scope["path"])

    async def engine_died(request: Request, error: EngineDied) -> Response:
        return error_response(unavailable(str(error), "engine_died"), request.scope["path"])

    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        metrics.client_disconnects += 1
        return Response(status_code=400)  # nobody reads it

    async def unexpected(request: Request, _: Exception) -> Response:
        # The server logs the exception, which Starlette raises again.
        return error_response(internal(), request.scope["path"])

    return {
        ApiError: api_error,
        HTTPException: routing_error,
        EngineDied: engine_died,
        ClientDisconnect: client_left,
        Exception: unexpected,
    }
