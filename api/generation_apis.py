"""The APIs that generate text: for each, its requests as one of the two inner forms, its ids, and how a stream breaks.

Router and replica look them up here by name or path. `chat` and `completions` are inner forms themselves.
"""

import secrets
from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import Struct

from api.errors import ApiError
from api.messages import answers as messages_answers
from api.messages import errors as messages_errors
from api.messages.conversion import chat_of as chat_of_messages
from api.messages.requests import MessagesRequest
from api.reading import read
from api.requests import ChatRequest, CompletionRequest
from api.responses import chat_id, completion_id
from api.sse import DONE, event

InnerRequest: TypeAlias = CompletionRequest | ChatRequest


class GenerationApi(Struct, frozen=True, eq=False, kw_only=True):
    name: str
    path: str
    request_type: type[Any]
    new_id: Callable[[], str]
    inner: Callable[[Any], InnerRequest] | None = None  # None: the request is one itself
    error_event: Callable[[ApiError], bytes]  # ends a stream that cannot go on
    last_event: bytes  # of a whole stream

    @property
    def is_chat(self) -> bool:
        """Tell whether its prompts are conversations."""
        return self.request_type is not CompletionRequest

    @property
    def is_inner(self) -> bool:
        return self.inner is None

    def read(self, body: bytes) -> tuple[InnerRequest, Any]:
        """The inner request, and the client's own; raise ApiError 400 that names the field."""
        request = read(body, self.request_type)
        return (request if self.inner is None else self.inner(request)), request


def _openai_error(error: ApiError) -> bytes:
    return event(error.body()) + DONE


COMPLETIONS = GenerationApi(
    name="completions",
    path="/v1/completions",
    request_type=CompletionRequest,
    new_id=completion_id,
    error_event=_openai_error,
    last_event=DONE,
)
CHAT = GenerationApi(
    name="chat",
    path="/v1/chat/completions",
    request_type=ChatRequest,
    new_id=chat_id,
    error_event=_openai_error,
    last_event=DONE,
)
MESSAGES = GenerationApi(
    name="messages",
    path="/v1/messages",
    request_type=MessagesRequest,
    new_id=lambda: f"msg_{secrets.token_hex(16)}",
    inner=chat_of_messages,
    error_event=messages_errors.error_event,
    last_event=messages_answers.LAST_EVENT,
)
APIS = {api.name: api for api in (COMPLETIONS, CHAT, MESSAGES)}
PATHS = {api.path: api for api in APIS.values()}


def error_body(error: ApiError, path: str) -> bytes:
    """The body of an error response, in the shape of the API at this path."""
    if path == MESSAGES.path or path.startswith(f"{MESSAGES.path}/"):
        return messages_errors.error_body(error)
    return error.body()
