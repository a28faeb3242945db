"""Messages between the router and a reading process: four bytes of length, then msgpack.

The router sends a Body, and the body's bytes behind it; the process answers with what it Found. Then the router sends
Make, Salt or Leave, and the process answers with what it Made, or with nothing to Leave. It may answer Refused to each.
"""

import struct
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from api.errors import ApiError
from api.openai_responses.named import NamedResponses
from api.retention import Retain
from router.prompts.pictures import Cut

LENGTH = struct.Struct("<I")
OUT_OF_MEMORY = 3  # the exit code of a process that has no memory for the message it was sent


class Body(Struct, tag=True):
    size: int
    whole: bool  # whether it is a generation request, whose contents matter
    names: bool = False  # whether the stored responses are wanted that it names


class Make(Struct, tag=True):
    """Request: make the body's prompt for this model."""

    model: str
    api: str  # its name in api.generation_apis
    tokenizer: str | None  # a path, or the name of the byte tokenizer; None: prompts are approximate
    template: str | None
    template_name: str
    vocab_size: int
    strict: bool
    lora: str | None
    salt: str | None
    max_model_len: int | None
    why_not: str | None  # why prompts are approximate
    with_text: bool  # approximate keys are wanted in any case
    engine: str  # the engine whose way of building prompts is followed; empty: our own
    native: bool  # all replicas are ours: send only the fields that they read; others need the salt in the body
    cuts: bool = False  # its engine is asked about pictures


class Salt(Struct, tag=True):
    """Request: replace the body's cache salt."""

    salt: str | None


class Leave(Struct, tag=True):
    """Request: drop the body."""


class Found(Struct, tag=True):
    """Response: the body's fields except its contents."""

    fields: dict[str, Any]  # the fields of `router.prompts.prompt.Peek`
    chat: bool
    error: str | None = None  # it is no JSON object
    named: NamedResponses = NamedResponses()  # stored responses, where they were asked for


class Made(Struct, tag=True):
    body: bytes | None = None  # set if it had to be changed
    salted: bool = False  # whether it says the salt that was asked for, and no longer the client's
    tokens: int = 0
    packed: list[bytes] = []
    exact: bool = False
    why_not: str | None = None
    choices: int = 1
    text_keys: bytes | None = None  # packed; of as many blocks as a replica is taken to hold
    text_bytes: int = 0
    beginning: str = ""
    shape: str | None = None  # the request's shape, if it has to be verified
    doubt: str | None = None  # why its tokens are not called exact
    retain: list[Retain] = []  # beginnings that replicas are asked to keep
    dated_s: float | None = None  # the moment at which its template was asked for the date
    reason: str | None = None  # `why_not` or `doubt` in a word
    further_tokens: int = 0  # the tokens of the prompts after the first one
    cut: Cut | None = None


class Refused(Struct, tag=True):
    status: int
    message: str
    error_type: str
    param: str | None
    code: str | None
    headers: dict[str, str]

    @classmethod
    def of(cls, error: ApiError) -> "Refused":
        return cls(error.status, error.message, error.type, error.param, error.code, error.headers)

    def error(self) -> ApiError:
        return ApiError(self.status, self.message, self.error_type, self.param, self.code, self.headers)


ToProcess: TypeAlias = Body | Make | Salt | Leave
FromProcess: TypeAlias = Found | Made | Refused

_encode = msgspec.msgpack.Encoder().encode
decode_to_process = msgspec.msgpack.Decoder(ToProcess).decode
decode_from_process = msgspec.msgpack.Decoder(FromProcess).decode


def framed(message: ToProcess | FromProcess) -> bytes:
    encoded = _encode(message)
    return LENGTH.pack(len(encoded)) + encoded
