"""The picker's HTTP/2, as gateways break it or use it in ways that gRPC's own client does not: by bare frames."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hpack import Decoder, Encoder

from api.http.connection import Limits
from router.http.picker.wire import HEALTH_SERVICE, SERVICE, HealthCheckRequest, ProcessingRequest, ProcessingResponse
from tests.router.http.picker.asking import BUFFERED, DUPLEX, asked, head
from tests.router.loopback import until
from tests.router.scripted import CHAT, DEADLINE_S, Served, named, served

LISTEN: dict[str, Any] = {"picker_listen": "127.0.0.1:0"}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, _, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 32
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 1, 3, 6, 9, 11
MANY = 25_000  # bare frames are counted by the second
PROCESS, CHECK = f"/{SERVICE}/Process", f"/{HEALTH_SERVICE}/Check"


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


def prefixed(message: Any) -> bytes:
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    return b"\0" + number(len(raw)) + raw


class Peer:
    """One connection, of which each frame is written as it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = Encoder(), Decoder()

    def block(self, path: str = PROCESS, *more: tuple[str, str]) -> bytes:
        names = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "p"), ("te", "trailers")]
        block: bytes = self.encoder.encode([*names, ("content-type", "application/grpc"), *more])
        return block

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def next(self, *kinds: int) -> tuple[int, int, int, bytes]:
        """The next frame of these kinds: kind, flags, stream, payload."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                start = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(start[:3], "big"))
                if start[3] in kinds or (start[3] == GOAWAY and GOAWAY not in kinds):
                    assert start[3] in kinds, f"GOAWAY {payload!r}"
                    return start[3], start[4], int.from_bytes(start[5:], "big"), payload

    async def trailers(self) -> Any:
        """The headers that end the next stream."""
        while True:
            _, flags, _, payload = await self.next(HEADERS)
            found = dict(self.decoder.decode(payload))
            if flags & END_STREAM:
                return found

    async def reply(self) -> Any:
        """The next message of the picker, if that is in one frame."""
        _, _, _, payload = await self.next(DATA)
        assert len(payload) == 5 + int.from_bytes(payload[1:5], "big")
        return ProcessingResponse.FromString(payload[5:])

    async def goes_away(self) -> int:
        """The code with which the connection ends."""
        _, _, _, payload = await self.next(GOAWAY)
        with suppress(ConnectionError):
            assert not await self.reader.read(), "it is closed"
        return int.from_bytes(payload[4:8], "big")


@asynccontextmanager
async def peer(running: Served, settings: bytes = b"") -> AsyncIterator[Peer]:
    assert running.front.picker is not None
    host, _, port = running.front.picker.address.rpartition(":")
    opened = Peer(*await asyncio.open_connection(host, int(port)))
    opened.send(PREFACE, frame(SETTINGS, settings))
    try:
        yield opened
    finally:
        opened.writer.close()


def asking(config: Any = BUFFERED, **headers: str) -> ProcessingRequest:
    return ProcessingRequest(
        request_headers=head({":method": "POST", ":path": CHAT, **headers}), protocol_config=config
    )


async def test_one_connection_survives_what_is_allowed() -> None:
    """Pings, priorities, unknown frames, messages in parts, an orderly GOAWAY."""
    async with served(named("one"), **LISTEN) as running, peer(running) as gateway:
        gateway.send(*(frame(PING, b"12345678") for _ in range(20)))
        for _ in range(20):
            _, flags, _, payload = await gateway.next(PING)
            assert (flags, payload) == (ACK, b"12345678")
        gateway.send(
            frame(PRIORITY, bytes(5), stream=1),
            frame(77, b"new"),
            frame(GOAWAY, bytes(8)),
            frame(HEADERS, bytes(5) + gateway.block(), WITH_PRIORITY | END_HEADERS, stream=1),
        )
        for byte in prefixed(asking()):
            gateway.send(frame(DATA, bytes((byte,)), stream=1))
        assert (await gateway.reply()).HasField("request_headers")
        gateway.send(frame(DATA, prefixed(ProcessingRequest(request_body={"body": asked()})), stream=1))
        assert (await gateway.reply()).dynamic_metadata["envoy.lb"]
        gateway.send(frame(RST_STREAM, number(8), stream=1), frame(DATA, b"late", stream=1))
        gateway.send(frame(WINDOW_UPDATE, number(1), stream=1), frame(RST_STREAM, number(8), stream=1))
        await running.idle()
        gateway.send(frame(HEADERS, gateway.block(CHECK), END_HEADERS, stream=3))
        gateway.send(frame(DATA, prefixed(HealthCheckRequest(service="liveness")), END_STREAM, stream=3))
        assert (await gateway.trailers())["grpc-status"] == "0"


Attack = Callable[[Peer], list[bytes]]
CALL: Attack = lambda gateway: [frame(HEADERS, gateway.block(), END_HEADERS, stream=1)]  # noqa: E731
ATTACKS: dict[str, tuple[int, Attack]] = {
    "a frame beyond 16 KiB": (FRAME_SIZE_ERROR, lambda _: [frame(DATA, bytes(16385), stream=1)]),
    "data of a stream that is not open": (PROTOCOL_ERROR, lambda _: [frame(DATA, b"x", stream=1)]),
    "a stream of ours": (PROTOCOL_ERROR, lambda gateway: [frame(HEADERS, gateway.block(), END_HEADERS, stream=2)]),
    "room of 0": (PROTOCOL_ERROR, lambda _: [frame(WINDOW_UPDATE, number(0))]),
    "room beyond all": (FLOW_CONTROL_ERROR, lambda _: [frame(WINDOW_UPDATE, number(2**31 - 1))]),
    "padding": (PROTOCOL_ERROR, lambda gateway: [*CALL(gateway), frame(DATA, b"\1abc", PADDED, stream=1)]),
    "headers that are none": (COMPRESSION_ERROR, lambda _: [frame(HEADERS, b"\xff" * 20, END_HEADERS, stream=1)]),
    "a continuation of nothing": (PROTOCOL_ERROR, lambda _: [frame(CONTINUATION, stream=1)]),
    "headers that go on in another frame": (
        PROTOCOL_ERROR,
        lambda gateway: [frame(HEADERS, gateway.block(), stream=1)],
    ),
    "headers that unpack to megabytes": (
        COMPRESSION_ERROR,
        lambda gateway: [
            frame(HEADERS, gateway.block(PROCESS, ("x", "y" * 3000)) + b"\xbe" * 3000, END_HEADERS, stream=1)
        ],
    ),
    "pings without end": (ENHANCE_YOUR_CALM, lambda _: [frame(PING, bytes(8))] * MANY),
    "settings without end": (ENHANCE_YOUR_CALM, lambda _: [frame(SETTINGS)] * 101),
    "empty data without end": (
        ENHANCE_YOUR_CALM,
        lambda gateway: [*CALL(gateway), *[frame(DATA, stream=1)] * MANY],
    ),
    "streams that are reset at once": (
        ENHANCE_YOUR_CALM,
        lambda gateway: [
            piece
            for stream in range(1, 301, 2)
            for piece in (
                frame(HEADERS, gateway.block(), END_HEADERS, stream=stream),
                frame(RST_STREAM, number(8), stream=stream),
            )
        ],
    ),
    "more than the window": (
        FLOW_CONTROL_ERROR,
        lambda gateway: [
            *CALL(gateway),
            frame(DATA, prefixed(asking()), stream=1),  # its reply waits for room
            *[frame(DATA, bytes(16384), stream=1)] * 17,
        ],
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_connection_that_breaks_the_protocol_ends_alone(attack: str) -> None:
    code, frames = ATTACKS[attack]
    async with served(named("one"), **LISTEN) as running, peer(running) as good, peer(running) as bad:
        good.send(frame(HEADERS, good.block(), END_HEADERS, stream=1), frame(DATA, prefixed(asking()), stream=1))
        await good.reply()
        settings = b"\0\4" + number(0) if attack == "more than the window" else b""
        bad.send(frame(SETTINGS, settings), *frames(bad))
        assert await bad.goes_away() == code
        good.send(frame(DATA, prefixed(ProcessingRequest(request_body={"body": asked()})), stream=1))
        assert (await good.reply()).dynamic_metadata["envoy.lb"]
        good.send(frame(RST_STREAM, number(8), stream=1))
        await running.idle()


async def test_other_protocols_are_refused() -> None:
    async with served(named("one"), **LISTEN) as running:
        assert running.front.picker is not None
        host, _, port = running.front.picker.address.rpartition(":")
        for said in (b"GET / HTTP/1.1\r\nhost: h\r\n\r\n", PREFACE + frame(CONTINUATION)):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(said)
            answer = await reader.read()
            writer.close()
            assert answer.endswith(number(PROTOCOL_ERROR))


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.process.front.connection_limits", lambda most: Limits(connections=most, head_s=0.1))
    async with served(named("one"), **LISTEN) as running:
        assert running.front.picker is not None
        host, _, port = running.front.picker.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionError):
            while await reader.read(100):
                pass
        writer.close()


@pytest.mark.parametrize(
    ("path", "sent", "status", "why"),
    [
        ("/other.Service/Method" + "d" * 200, b"", "12", "/other.Service/Method"),
        (PROCESS, b"\1" + number(1) + b"x", "12", "compressed"),
        (CHECK, prefixed(b"\xff"), "3", "cannot be decoded"),
        (CHECK, b"\0" + number(2**31), "8", "bytes; at most"),
    ],
)
async def test_a_call_that_cannot_be_answered_says_why(path: str, sent: bytes, status: str, why: str) -> None:
    async with served(named("one"), **LISTEN) as running, peer(running) as gateway:
        gateway.send(frame(HEADERS, gateway.block(path), END_HEADERS, stream=1), frame(DATA, sent, stream=1))
        trailers = await gateway.trailers()
        assert trailers["grpc-status"] == status
        assert why in trailers["grpc-message"]


async def test_a_body_beyond_the_limit_that_is_buffered_is_refused_and_not_let_pass() -> None:
    async with served(named("one"), max_body_bytes=100_000, **LISTEN) as running, peer(running) as gateway:
        gateway.send(frame(HEADERS, gateway.block(), END_HEADERS, stream=1), frame(DATA, prefixed(asking()), stream=1))
        await gateway.reply()
        gateway.send(frame(DATA, b"\0" + number(10**6), stream=1))
        refusal = (await gateway.reply()).immediate_response
        assert refusal.status.code == 413 and b"body_too_large" in refusal.body
        assert (await gateway.trailers())["grpc-status"] == "0"


async def test_replies_wait_for_room_and_so_do_further_messages() -> None:
    async with served(named("one"), **LISTEN) as running, peer(running, b"\0\4" + number(10)) as gateway:
        body = asked("x" * 100_000)
        gateway.send(frame(HEADERS, gateway.block(), END_HEADERS, stream=1))
        sent = prefixed(asking(DUPLEX)) + prefixed(
            ProcessingRequest(request_body={"body": body, "end_of_stream": True})
        )
        gateway.send(*(frame(DATA, sent[at : at + 16384], stream=1) for at in range(0, len(sent), 16384)))
        got, room = bytearray(), 10
        while got.count(b"x") < 100_000:
            _, _, _, payload = await gateway.next(DATA)
            got += payload
            room -= len(payload)
            assert room >= 0
            if not room:
                room = 20_000
                gateway.send(frame(WINDOW_UPDATE, number(room), stream=1), frame(WINDOW_UPDATE, number(room)))
        gateway.send(frame(RST_STREAM, number(8), stream=1))
        await running.idle()


async def test_a_gateway_that_takes_no_reply_does_not_keep_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(connections=10, whole_body_s=0.1)
    monkeypatch.setattr("router.process.front.connection_limits", lambda _: limits)
    async with served(named("one"), **LISTEN) as running, peer(running, b"\0\4" + number(0)) as gateway:
        gateway.send(frame(HEADERS, gateway.block(), END_HEADERS, stream=1), frame(DATA, prefixed(asking()), stream=1))
        _, _, stream, _ = await gateway.next(RST_STREAM)
        assert stream == 1
        await running.idle()


async def test_a_gateway_that_does_not_read_gets_the_rest_later() -> None:
    most = number(2**31 - 1)
    async with served(named("one"), **LISTEN) as running, peer(running, b"\0\4" + most) as gateway:
        body = asked("x" * 8_000_000)
        gateway.send(frame(WINDOW_UPDATE, number(2**30)), frame(HEADERS, gateway.block(), END_HEADERS, stream=1))
        sent = prefixed(asking(DUPLEX)) + prefixed(
            ProcessingRequest(request_body={"body": body, "end_of_stream": True})
        )
        transport: Any = gateway.writer.transport
        transport.pause_reading()
        gateway.send(*(frame(DATA, sent[at : at + 16384], stream=1) for at in range(0, len(sent), 16384)))
        await until(lambda: bool(running.router.attempts), "it is placed")
        transport.resume_reading()
        got = 0
        while got < 8_000_000:
            got += (await gateway.next(DATA))[3].count(b"x")
        gateway.send(frame(RST_STREAM, number(8), stream=1))
        await running.idle()


async def test_a_router_that_ends_lets_open_streams_end_and_takes_no_more() -> None:
    async with served(named("one"), **LISTEN) as running, peer(running) as gateway:
        gateway.send(frame(HEADERS, gateway.block(), END_HEADERS, stream=1), frame(DATA, prefixed(asking()), stream=1))
        await gateway.reply()
        assert running.front.picker is not None
        closing = asyncio.create_task(running.front.picker.close())
        _, _, _, payload = await gateway.next(GOAWAY)
        assert payload == number(1) + number(0)
        gateway.send(frame(HEADERS, gateway.block(), END_HEADERS, stream=3))
        assert (await gateway.next(RST_STREAM))[2:] == (3, number(7))
        gateway.send(frame(DATA, prefixed(ProcessingRequest(request_body={"body": asked()})), stream=1))
        assert (await gateway.reply()).dynamic_metadata["envoy.lb"]
        gateway.send(frame(RST_STREAM, number(8), stream=1))
        await closing
        await until(lambda: gateway.reader.at_eof(), "the connection is closed")
