"""Error responses in OpenAI's shape. A message quotes the value and names the fix."""

import math
from collections.abc import Iterable, Mapping

import msgspec

QUOTED_CHARACTERS = 100
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """A response other than 2xx."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return _encode({"error": {name: value and encodable(value) for name, value in fields.items()}})


def quoted(value: object) -> str:
    """A value as it appears in an error: JSON, shortened."""
    try:
        text = _encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = repr(type(value))
    return text if len(text) <= QUOTED_CHARACTERS else text[: QUOTED_CHARACTERS - 3] + "..."


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthorized() -> ApiError:
    message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def not_found(path: str) -> ApiError:
    return ApiError(404, f"there is nothing at {quoted(path)}; see /docs for the routes", code="not_found")


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    message = f"the model {quoted(name)} is not served here; ask for {' or '.join(map(quoted, known)) or 'none yet'}"
    return ApiError(404, message, param="model", code="model_not_found")


def method_not_allowed(method: str, path: str, allowed: Iterable[str]) -> ApiError:
    methods = ", ".join(allowed)
    message = f"{quoted(path)} does not take {method}; use {methods}"
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": methods})


def too_long(message: str, param: str | None = None) -> ApiError:
    return invalid(message, param, CONTEXT_LENGTH_EXCEEDED)


def context_length(limit: int) -> str:
    """The sentence by which clients recognize a prompt that is too long."""
    return f"This model's maximum context length is {limit} tokens."


def queue_full(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="queue_full", headers=_retry_after(retry_after_s))


def class_refused(name: str, retry_after_s: float) -> ApiError:
    message = (
        f"requests of class {quoted(name)} are refused for now: replicas are too busy to serve it, or a class above, "
        "in time; try again"
    )
    return ApiError(503, message, "service_unavailable", code="class_refused", headers=_retry_after(retry_after_s))


def draining(retry_after_s: float = 1.0) -> ApiError:
    message = "this server is shutting down and takes no new requests; try again, another one may answer"
    return ApiError(503, message, "service_unavailable", code="draining", headers=_retry_after(retry_after_s))


def internal() -> ApiError:
    """An error that does not say its cause, which is in the log."""
    return ApiError(500, "the server failed; see its log", "server_error", code="internal_error")


def _retry_after(seconds: float) -> dict[str, str]:
    # The header counts whole seconds (RFC 9110, 10.2.3), and 0 would invite a storm.
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def encodable(text: str) -> str:
    """The text without lone surrogates, which cannot be written as UTF-8."""
    return text.encode(errors="replace").decode()
