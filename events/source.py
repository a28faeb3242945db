"""The endpoints of one replica's stream, the views made of it, and its records. New fields go last, with a default."""

import re

from msgspec import Struct

from events.cache.resolver import Resolver
from events.sockets.curve import CurveClient
from events.stream.foreign_stream import ForeignStream
from events.stream.native_stream import NativeStream
from events.stream.states import StreamConfig
from events.stream.stream import Stream
from events.view import CacheView

ENDPOINT = "tcp://HOST:PORT, with a port from 1 to 65535, or ipc://PATH"
MAX_IPC_BYTES = 107  # the address of a Unix socket has room for this many

_TCP = re.compile(r"tcp://[A-Za-z0-9_.:%\[\]-]+:([0-9]{1,5})")
_LOCAL = re.compile(r"ipc://[^\0]+")


class Source(Struct, frozen=True):
    """The endpoints of one replica's stream. With `snapshot` it is a native one; else `status` brings SGLang's load."""

    name: str
    events: str
    replay: str | None = None
    status: str | None = None
    snapshot: str | None = None
    topic: str = ""
    model: str = ""
    curve: CurveClient | None = None

    @property
    def native(self) -> bool:
        return self.snapshot is not None

    def check(self) -> None:
        for field in ("events", "replay", "status", "snapshot"):
            endpoint = getattr(self, field)
            if endpoint is not None and not can_connect(endpoint):
                raise ValueError(f"{self.name}: {field} is {endpoint!r}; write {ENDPOINT}")

    def stream(self) -> Stream:
        config = StreamConfig(can_replay=self.replay is not None)
        return NativeStream(config) if self.native else ForeignStream(config)

    def resolver(self) -> Resolver:
        return Resolver(self.model, native=self.native)

    def view(self) -> CacheView:
        return CacheView(self.name, self.stream(), self.resolver())


def can_connect(endpoint: str) -> bool:
    if tcp := _TCP.fullmatch(endpoint):
        return 1 <= int(tcp[1]) <= 65535
    return _LOCAL.fullmatch(endpoint) is not None and len(endpoint.encode()) <= len("ipc://") + MAX_IPC_BYTES


class Header(Struct, frozen=True):
    sources: list[Source]
    created: float
    tool: str


class Record(Struct, array_like=True, frozen=True):
    """One message, or a mark without frames: "connected", "disconnected", "tick" or "standstill" (`subscriber.Tap`)."""

    time: float
    source: int
    kind: str
    frames: list[bytes]

    @property
    def seq(self) -> int | None:
        if self.kind != "events" or len(self.frames) != 3 or len(self.frames[1]) != 8:
            return None
        return int.from_bytes(self.frames[1], "big")
