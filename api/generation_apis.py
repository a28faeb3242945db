"""The APIs that generate text: for each, its requests as one of the two inner forms, its ids, and how a stream breaks.

Router and replica look them up here by name or path. `chat` and `completions` are inner forms themselves.
"""

import re
import secrets
from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import Struct

from api.errors import ApiError
from api.messages import answers as messages_answers
from api.messages.conversion import chat_of as chat_of_messages
from api.messages.requests import MessagesRequest
from api.openai.requests import ChatRequest, CompletionRequest
from api.openai_responses import output as responses_output
from api.openai_responses.conversion import chat_of as chat_of_responses
from api.openai_responses.requests import ResponsesRequest
from api.reading import read
from api.responses import DONE, event

InnerRequest: TypeAlias = CompletionRequest | ChatRequest


class GenerationApi(Struct, frozen=True, eq=False, kw_only=True):
    name: str
    path: str
    request_type: type[Any]
    id_prefix: str
    inner: Callable[[Any], InnerRequest] | None = None  # None: the request is one itself
    # It ends a stream that breaks, after this many events.
    error_event: Callable[[ApiError, int], bytes] = lambda error, _: event(error.body()) + DONE
    last_event: bytes = DONE  # the last event of a whole stream, or its beginning if there is an `ending`
    ending: re.Pattern[bytes] | None = None  # finds a last event that is not always the same
    is_chat: bool = True  # whether its prompts are conversations

    @property
    def is_inner(self) -> bool:
        return self.inner is None

    def new_id(self) -> str:
        return self.id_prefix + secrets.token_hex(16)

    def read(self, body: bytes, complete: Callable[[Any], None] | None = None) -> tuple[InnerRequest, Any]:
        """The inner request, and the client's own; raise ApiError 400 that names the field.

        `complete` may add to the client's request what its body only refers to.
        """
        request = read(body, self.request_type)
        if complete is not None:
            complete(request)
        return (request if self.inner is None else self.inner(request)), request


def _responses_error(error: ApiError, events: int) -> bytes:
    fields = {"message": error.message, "code": error.code, "param": error.param}
    return responses_output.event_bytes(("error", fields), events)


COMPLETIONS = GenerationApi(
    name="completions", path="/v1/completions", request_type=CompletionRequest, id_prefix="cmpl-", is_chat=False
)
CHAT = GenerationApi(name="chat", path="/v1/chat/completions", request_type=ChatRequest, id_prefix="chatcmpl-")
MESSAGES = GenerationApi(
    name="messages",
    path="/v1/messages",
    request_type=MessagesRequest,
    id_prefix="msg_",
    inner=chat_of_messages,
    error_event=lambda error, _: messages_answers.error_event(error),
    last_event=messages_answers.LAST_EVENT,
)
RESPONSES = GenerationApi(
    name="responses",
    path="/v1/responses",
    request_type=ResponsesRequest,
    id_prefix="resp_",
    inner=chat_of_responses,
    error_event=_responses_error,
    last_event=b"event: response.completed",
    ending=re.compile(rb"(?:\A|\n)event: response\.(?:completed|incomplete)\n"),
)
APIS = {api.name: api for api in (COMPLETIONS, CHAT, MESSAGES, RESPONSES)}
PATHS = {api.path: api for api in APIS.values()}


def error_body(error: ApiError, path: str) -> bytes:
    """The body of an error response, in the shape of the API at this path."""
    if path == MESSAGES.path or path.startswith(f"{MESSAGES.path}/"):
        return messages_answers.error_body(error)
    return error.body()
