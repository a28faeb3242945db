"""Messages of a gateway and of the picker, without protobuf: what the stream's state machine takes and gives."""

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

from msgspec import Struct

from router.members.upstream import Header


class Mode(IntEnum):
    """How a gateway sends bodies (`BodySendMode`)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


PICKS_BY_BODY = (Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED)  # others send a request on before its body has come


# ---- from the gateway


class RequestHeaders(Struct, frozen=True):
    headers: Sequence[Header]  # pseudo-headers included
    end: bool = False  # there is no body
    request_mode: int = Mode.FULL_DUPLEX_STREAMED
    response_mode: int = Mode.FULL_DUPLEX_STREAMED
    subset: frozenset[str] | None = None  # addresses to choose from; None: all


class RequestBody(Struct, frozen=True):
    body: bytes
    end: bool = False


class RequestTrailers(Struct, frozen=True):
    names: Sequence[bytes] = ()


class ResponseHeaders(Struct, frozen=True):
    status: int
    headers: Sequence[Header] = ()
    end: bool = False
    served: str | None = None  # the address that has answered, if the gateway tells


class ResponseBody(Struct, frozen=True):
    body: bytes
    end: bool = False


class ResponseTrailers(Struct, frozen=True):
    pass


Message: TypeAlias = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseBody | ResponseTrailers


# ---- of the router


class Mutation(Struct, frozen=True):
    """Changes of headers."""

    changed: Sequence[Header] = ()
    removed: Sequence[bytes] = ()


UNCHANGED = Mutation()


class Pick(Struct, frozen=True):
    """The choice for a request."""

    endpoints: Sequence[str]  # the best is first; the others are for retries
    mutation: Mutation = UNCHANGED
    body: bytes | bytearray = b""  # as the replica should get it; nobody changes it
    is_changed: bool = False  # it differs from what came


class Refusal(Struct, frozen=True):
    """The answer to a request that goes nowhere, or that the router answers by itself."""

    status: int
    headers: Sequence[Header] = ()
    body: bytes = b""


Outcome: TypeAlias = Pick | Refusal


# ---- to the gateway


class Reply(Struct):
    """The answer to one message, or a part of it."""

    about: str  # the field of Envoy's ProcessingResponse
    mutation: Mutation = UNCHANGED
    endpoints: str = ""
    part: bytes | None = None  # of a body that streams
    end: bool = False  # it is the last
    whole: bytes | None = None  # in place of a buffered body
