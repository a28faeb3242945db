"""Asks an engine for the sockets of its cache events. Pure but for the questions.

Each sentence for a user ends with what to change.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Protocol, TypeAlias

import msgspec
from msgspec import Meta, Struct

MAX_RANKS = 256  # behind one URL
SWITCH_ON = (
    'start it with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}\''
)
NAME_THEM = "name them: events=tcp://HOST:PORT,replay=tcp://HOST:PORT"
NO_EVENTS = f"it publishes no cache events: {SWITCH_ON}"
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Endpoint = Annotated[str, Meta(max_length=256)]


class Publisher(Struct, frozen=True):
    """An engine's settings of its events."""

    enable_kv_cache_events: bool = True
    publisher: str | None = None
    endpoint: Endpoint | None = None
    replay_endpoint: Endpoint | None = None
    topic: Endpoint = ""
    load_endpoint: Endpoint | None = None


class Sources(Struct, frozen=True):
    """The engine's word: its ranks by number, and why some or all of them cannot be followed."""

    publishers: dict[int, Publisher | None] = {}  # None: this rank sends no events
    why_not: str = ""
    steered: bool = True  # requests can be sent to one rank
    failed: bool = False  # the engine could not answer this time


class Answer(Protocol):
    @property
    def status(self) -> int: ...
    @property
    def body(self) -> bytes: ...


Ask: TypeAlias = Callable[[str], Awaitable[Answer]]  # asks for a path


async def untold(ask: Ask) -> Sources:  # noqa: ARG001
    return Sources(why_not=f"its engine does not tell event sockets; if it has some, {NAME_THEM}")
