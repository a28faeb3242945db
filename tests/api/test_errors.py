import json

import pytest

from api import errors
from api.errors import ApiError


def test_the_body_has_the_shape_of_openai() -> None:
    error = errors.invalid("temperature is -1; it must be at least 0", "temperature")
    assert json.loads(error.body()) == {
        "error": {
            "message": "temperature is -1; it must be at least 0",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": None,
        }
    }


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.unauthorized(), 401, "invalid_api_key"),
        (errors.not_found("/x"), 404, "not_found"),
        (errors.unknown_model("gpt-9", ["demo"]), 404, "model_not_found"),
        (errors.method_not_allowed("PUT", "/v1/models", ["GET", "HEAD"]), 405, "method_not_allowed"),
        (errors.too_long("9000 tokens; at most 8192 fit", "prompt"), 400, "context_length_exceeded"),
        (errors.queue_full("1024 requests wait", 2.5), 429, "queue_full"),
        (errors.draining(), 503, "draining"),
        (errors.internal(), 500, "internal_error"),
    ],
)
def test_every_error_has_its_status_and_code(error: ApiError, status: int, code: str) -> None:
    assert (error.status, error.code) == (status, code)
    assert json.loads(error.body())["error"]["code"] == code


def test_an_unknown_model_names_those_that_are_served() -> None:
    assert (
        'the model "gpt-9" is not served here; ask for "a" or "b"' in errors.unknown_model("gpt-9", ["a", "b"]).message
    )


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (2.5, "3")])
def test_retry_after_is_whole_seconds_and_never_none(seconds: float, header: str) -> None:
    assert errors.queue_full("full", seconds).headers == {"Retry-After": header}


@pytest.mark.parametrize("value", ["\ud800", object(), 10**400])
def test_any_value_can_be_quoted(value: object) -> None:
    assert errors.quoted(value)
