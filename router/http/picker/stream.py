r"""One gateway's stream as a state machine: its messages, without protobuf, and the replies that each one needs.

    new -> asking -> deciding -> picked -> answering -> over
              \________\________________________/        a refusal, or an answer of the gateway's own

It keeps nothing of a body, and knows neither gRPC nor the router: `receive` a message, then `decide` once the outcome
is known; a refusal may come as soon as the headers have.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import TypeAlias

from msgspec import Struct

from router.members.upstream import Header

ENDPOINT = b"x-gateway-destination-endpoint"
PART_BYTES = 62_000  # a part of a body that streams back; Envoy takes 64 KiB


class Mode(IntEnum):
    """How a gateway sends bodies (`BodySendMode`)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


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


class Mutation(Struct, frozen=True):
    changed: Sequence[Header] = ()
    removed: Sequence[bytes] = ()


class Pick(Struct, frozen=True):
    endpoint: str
    mutation: Mutation = Mutation()
    body: bytes | bytearray = b""  # the replica should get it so; nobody changes it
    is_changed: bool = False  # it differs from the one that came


class Refusal(Struct, frozen=True):
    """The answer to a request that goes nowhere, or that the router answers by itself."""

    status: int
    headers: Sequence[Header] = ()
    body: bytes = b""


Outcome: TypeAlias = Pick | Refusal


class Reply(Struct):
    """The answer to one message of the gateway, or a part of it."""

    about: str  # the field of Envoy's ProcessingResponse
    mutation: Mutation = Mutation()
    endpoint: str = ""
    part: bytes | None = None  # a part of a streamed body
    end: bool = False  # it is the last
    whole: bytes | None = None  # replaces a buffered body


class OutOfOrder(Exception):
    """A message that cannot come now."""


class Phase(IntEnum):
    NEW = 0
    ASKING = 1  # the request's body comes
    DECIDING = 2  # all of the request is there
    PICKED = 3
    ANSWERING = 4
    OVER = 5


BEFORE_ANSWERS = Phase.ASKING, Phase.DECIDING, Phase.PICKED


class PickerStream:
    def __init__(self) -> None:
        self.phase = Phase.NEW
        self._request_mode: int = Mode.FULL_DUPLEX_STREAMED
        self._response_mode: int = Mode.FULL_DUPLEX_STREAMED
        self._has_body = False
        self._trailers: Sequence[bytes] | None = None  # their names; None: none have come

    @property
    def is_open(self) -> bool:
        """Tell whether the request may still be decided."""
        return self.phase <= Phase.DECIDING

    def receive(self, message: Message) -> list[Reply]:
        """Take the next message; raise OutOfOrder if it is no next one."""
        match message:
            case RequestHeaders():
                self._expect(message, Phase.NEW)
                self._request_mode, self._response_mode = message.request_mode, message.response_mode
                self.phase = Phase.DECIDING if message.end else Phase.ASKING
                is_held_back = self._request_mode == Mode.BUFFERED and not message.end
                return [Reply("request_headers")] if is_held_back else []
            case RequestBody():
                self._expect(message, Phase.ASKING)
                self._has_body = True
                if message.end or self._request_mode == Mode.BUFFERED:
                    self.phase = Phase.DECIDING
                return []
            case RequestTrailers():
                if self._request_mode == Mode.BUFFERED:
                    self._expect(message, Phase.PICKED)  # earlier, their reply could not name an endpoint
                    return [Reply("request_trailers", Mutation((), message.names))]
                self._expect(message, Phase.ASKING)
                self._trailers = message.names
                self.phase = Phase.DECIDING
                return []
            case ResponseHeaders():
                # Before a choice is made, the answer is the gateway's own, and ends the request.
                self._expect(message, *BEFORE_ANSWERS)
                self.phase = Phase.OVER if message.end else Phase.ANSWERING
                return [Reply("response_headers")]
            case ResponseBody():
                self._expect(message, Phase.ANSWERING)
                if message.end:
                    self.phase = Phase.OVER
                if self._response_mode != Mode.FULL_DUPLEX_STREAMED:
                    return [Reply("response_body")]
                return list(parts("response_body", message.body, end=message.end))
            case ResponseTrailers():
                self._expect(message, Phase.ANSWERING)
                self.phase = Phase.OVER
                return [Reply("response_trailers")]

    def decide(self, outcome: Outcome) -> Iterable[Reply | Refusal]:
        """Tell the gateway where the request goes, or its answer; parts of a body are made as they are read."""
        assert self.is_open, "it is decided once"
        if isinstance(outcome, Refusal):
            self.phase = Phase.OVER
            return [outcome]
        assert self.phase is Phase.DECIDING, "a whole request is placed"
        self.phase = Phase.PICKED
        changed = [*outcome.mutation.changed, (ENDPOINT, outcome.endpoint.encode())]
        removed = [name for name in outcome.mutation.removed if name != ENDPOINT]  # a client may have named it
        if self._request_mode == Mode.BUFFERED and self._has_body:
            if outcome.is_changed:
                changed.append((b"content-length", b"%d" % len(outcome.body)))
            whole = bytes(outcome.body) if outcome.is_changed else None
            return [Reply("request_body", Mutation(changed, removed), outcome.endpoint, whole=whole)]
        if self._trailers is not None:
            removed.append(b"content-length")  # the body may have another one now
        elif self._has_body:
            changed.append((b"content-length", b"%d" % len(outcome.body)))
        body = parts("request_body", outcome.body, end=self._trailers is None) if self._has_body else ()
        # All trailers are removed: replicas take some for headers, which they obey.
        trailers = () if self._trailers is None else (Reply("request_trailers", Mutation((), self._trailers)),)
        return chain((Reply("request_headers", Mutation(changed, removed), outcome.endpoint),), body, trailers)

    def _expect(self, message: Message, *phases: Phase) -> None:
        if self.phase not in phases:
            raise OutOfOrder(f"{type(message).__name__} came when the stream was {self.phase.name.lower()}")


def parts(about: str, body: bytes | bytearray, *, end: bool) -> Iterator[Reply]:
    """A body in parts of a size that the gateway takes; one without bytes, too, says whether it ends."""
    view = memoryview(body)
    for at in range(0, max(1, len(body)), PART_BYTES):
        yield Reply(about, part=bytes(view[at : at + PART_BYTES]), end=end and at + PART_BYTES >= len(body))
