"""Errors in the Messages API's own shape."""

import msgspec

from api.errors import ApiError, encodable

# Clients of agents look for these words to shorten the conversation.
TOO_LONG = "prompt is too long"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_encode = msgspec.json.Encoder().encode


def error_body(error: ApiError) -> bytes:
    """The body; `param` and `code` are additions, which routers read."""
    message = error.message
    if error.code == "context_length_exceeded" and not message.startswith(TOO_LONG):
        message = f"{TOO_LONG}: {message}"
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"type": kind, "message": message, "param": error.param, "code": error.code}
    return _encode({"type": "error", "error": {name: value and encodable(value) for name, value in details.items()}})


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % error_body(error)
