"""Measure the router's front without sockets: parsing, admission, choice, sending, answering, accounting.

The system calls come on top; `tests.bench.peers` measures whole routers beside others.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterator
from itertools import count, cycle
from tempfile import TemporaryFile
from typing import Any

import msgspec
import uvloop

from api.http.connection import Connections, Limits
from router.config import RouterConfig
from router.core import Router
from router.http.app import build_app
from router.http.front import FrontConnection, Openings
from router.http.routes import FORWARDED, TABLE
from router.members.facts import Facts, Rank
from router.members.feed import Feeds
from router.members.members import Member, Members
from router.members.spec import parse_replica
from router.members.upstream import Connection
from router.placement.placement import Placement
from router.process.front import upkeep_of
from router.prompts.tokenizers import Tokenizers
from router.tenants.admission import Admission
from router.tenants.keys import Key, digest_of
from router.tenants.shared_limits import SharedLimits
from tests.bench.measure import calls, cpu_us, heading, row, rows_of_calls

REQUESTS = 2000
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
WITH_KEY = b"authorization: Bearer %b\r\n"
KEYS = tuple(Key(name=f"key-{number}", digest=digest_of(f"key-{number}")) for number in range(1000))
KEY = KEYS[0]
LIMITED = msgspec.structs.replace(
    KEY, requests_per_minute=1e9, max_in_flight=10**6, tokens_per_minute=1e12, tokens_per_day=1e14, requests_per_day=1e9
)
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 400\r\n\r\n" + b"x" * 400
EVENT = b"data: " + b"y" * 180 + b"\n\n"
STREAM = [
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    *[b"%x\r\n%b\r\n" % (len(EVENT), EVENT)] * 16,
    b"0\r\n\r\n",
]


class Wire(asyncio.Transport):
    """A transport that keeps all written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.written: list[bytes] = []
        self._socket = socket.socket()  # for options to be set

    def write(self, data: Any) -> None:
        self.written.append(data)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        known = {"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2), "socket": self._socket}
        return known.get(name, default)

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None:
        self._socket.close()

    abort = close


class FrontOnWires:
    """A router with in-memory wires for client and replicas."""

    def __init__(self, replicas: int = 2, shared: SharedLimits | None = None, **config_fields: Any) -> None:
        config = RouterConfig(ask_engines=False, **config_fields)  # prompts are placed by their text
        keys = [WITH_KEY % key.name.encode() for key in config.keys] or [b""]
        self._heads = cycle([HEAD + line + b"\r\n" for line in keys])
        placement = Placement(config.policy, optimistic_ttl_s=30.0, first_token_timeout_s=300.0)
        tokenizers = Tokenizers({}, {}, 10**6)
        self.router = Router(
            config,
            Members(tokenizers.of),
            Feeds(placement.index, lambda *_: None),
            placement,
            Admission(config.keys, demand_key=bool(config.keys), shared=shared),
        )
        self.upkeep = upkeep_of(self.router, tokenizers)
        specs = [parse_replica(f"url=http://127.0.0.1:{port},engine=vllm") for port in range(1, replicas + 1)]
        self.upkeep.apply({spec.name: spec for spec in specs})
        self.connections = [self._connect(member) for member in self.router.members]
        self.router.members.arrange()
        app = build_app(self.router, self.upkeep, TABLE)
        self.front = FrontConnection(Connections(), Limits(), app, TABLE, Openings(self.router, FORWARDED))
        self.client = Wire()
        self.front.connection_made(self.client)

    def _connect(self, member: Member) -> Connection:
        spec = msgspec.structs.replace(member.spec, model="m")
        member.describe(Facts(spec=spec, models=("m",)), Rank(spec))
        member.health.probed(True, "", self.router.now_s())
        connection = Connection(member.upstream)
        wire = Wire()
        wire.set_protocol(connection)
        connection.connection_made(wire)
        member.upstream.idle.append(connection)
        return connection

    def ask(self, body: bytes, answer: list[bytes]) -> int:
        """Return how often something was written, which are as many system calls."""
        self.front.data_received(next(self._heads) % len(body) + body)
        writes = 0
        for connection in self.connections:
            wire: Any = connection.transport
            if wire.written:
                writes += len(wire.written)
                wire.written.clear()
                for piece in answer:
                    wire.protocol.data_received(piece)
        assert self.client.written, "the request got no answer"
        writes += len(self.client.written)
        self.client.written.clear()
        return writes

    async def close(self) -> None:
        self.client.close()
        await self.upkeep.close()
        self.router.feeds.close()
        self.router.close()


def bodies(characters: int, stream: bool, start: int) -> list[bytes]:
    """Half of each prompt is shared with others; none is repeated."""
    shared = "word " * (characters // 10)
    return [
        json.dumps(
            {
                "model": "m",
                "max_tokens": 16,
                "stream": stream,
                "messages": [{"role": "user", "content": f"{n % 16} {shared}{n:012d} {shared}"}],
            }
        ).encode()
        for n in range(start, start + REQUESTS)
    ]


def run(rounds: int) -> None:
    logging.disable(logging.WARNING)
    uvloop.run(_run(rounds))
    logging.disable(logging.NOTSET)


async def _run(rounds: int) -> None:
    heading("a request through the front, approximate mode, 2 replicas, no sockets")
    with TemporaryFile() as lock:
        for name, characters, stream, answer, more in (
            ("800 characters, one answer", 800, False, [PLAIN], {}),
            ("the same with a key", 800, False, [PLAIN], {"keys": (KEY,)}),
            ("the same with 1,000 keys by turns", 800, False, [PLAIN], {"keys": KEYS}),
            ("the same with limits", 800, False, [PLAIN], {"keys": (LIMITED,)}),
            ("the same, 4 workers", 800, False, [PLAIN], {"keys": (LIMITED,), "shared": SharedLimits(4, lock)}),
            ("16,000 characters, 16 events", 16_000, True, STREAM, {}),
        ):
            await _measure(name, characters, stream, answer, rounds, more)
    print()


async def _measure(
    name: str, characters: int, stream: bool, answer: list[bytes], rounds: int, more: dict[str, Any]
) -> None:
    front = FrontOnWires(**more)
    starts = count(0, REQUESTS)

    def prepare(
        front: FrontOnWires = front,
        starts: Iterator[int] = starts,
        characters: int = characters,
        stream: bool = stream,
        answer: list[bytes] = answer,
    ) -> Callable[[], object]:
        asked = bodies(characters, stream, next(starts))

        def work() -> None:
            for body in asked:
                front.ask(body, answer)

        return work

    prepare()()
    row(name, cpu_us(prepare, REQUESTS, rounds), "us")
    [body, *_] = bodies(characters, stream, REQUESTS + 1)
    with calls() as made:
        front.ask(body, answer)
    rows_of_calls(name, made)
    await front.close()
