"""Sources and readers that go, lie, stop or flood: each costs a bounded time, and nothing wrong is used."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import pytest

from replica.neighbours.connection import Connection, Patience
from replica.neighbours.messages import LENGTH, MAX_ANSWER_BYTES, Block, Offer, Read, Welcome, encode
from replica.neighbours.reader import read_of
from replica.neighbours.sealed import CHALLENGE_BYTES, SEAL_BYTES, reply_to
from tests.events.processes import wait_until
from tests.replica.engines import chain
from tests.replica.neighbours.liars import Lie, liar, lies_at, true_block, with_header
from tests.replica.neighbours.replicas import (
    BLOCK_BYTES,
    SECRET,
    ArrayMemory,
    ServingEngine,
    came,
    neighbour_config,
    pull,
    reading,
    tokens_of,
    wanted,
)

SOON_S = 15.0
MEGABYTE = 1_000_000


def soon() -> float:
    return time.monotonic() + SOON_S


# ---- the source ends or stops, in the middle of a pull


@pytest.mark.parametrize("reason", ["closed", "stalled"])
def test_a_source_that_goes_leaves_what_came_until_then(reason: str) -> None:
    memory, want, over = ArrayMemory(48, MEGABYTE), wanted(48), threading.Event()
    engine = ServingEngine(128, MEGABYTE, share=1.0)
    engine.serve(chain([*tokens_of(48), 1]))

    def go(block: int) -> None:
        if block == 4 and reason == "closed":
            engine.source.close()
        elif block == 4:
            engine.memory.on_read = lambda _: over.wait(SOON_S)

    memory.on_write = go
    try:
        with reading(memory, stall_s=0.5) as own:
            began_s = time.monotonic()
            count = pull(own, engine.source.endpoint, want, range(48), soon())
            assert 5 <= count < 48, "the rest was not sent yet"
            assert time.monotonic() - began_s < 5
            assert came(memory, want, range(48), count)
            assert own.counts.failures == {reason: 1}
            # It is dead for a while, and asking it costs nothing.
            assert pull(own, engine.source.endpoint, want, range(48), soon()) == 0
            assert own.counts.failures["dead"] == 1
    finally:
        over.set()
        engine.close()


# ---- the source lies

LIES: dict[str, tuple[Lie, str, int]] = {
    "wrong tokens": (lies_at(2, with_header(tokens=b"\1" * 16)), "tokens", 2),
    "extra keys of another": (lies_at(2, with_header(exact=b"other")), "tokens", 2),
    "a block again": (lies_at(2, with_header(index=1)), "order", 2),
    "a block left out": (lies_at(2, with_header(index=3)), "order", 2),
    "a huge block": (lies_at(2, with_header(size=2**62)), "size", 2),
    "a block of a negative size": (lies_at(2, with_header(size=-1)), "size", 2),
    "a short block": (lies_at(2, with_header(size=BLOCK_BYTES - 1)), "size", 2),
    "a damaged payload": (lies_at(2, lambda block, payload: (block, payload[:-1] + b"?")), "checksum", 2),
    "the payload of another block": (lies_at(2, lambda block, payload: (block, payload[::-1])), "checksum", 2),
    "a longer payload": (lies_at(2, lambda block, payload: (block, payload + b"more")), "size", 3),
    "a checksum of no length": (lies_at(2, with_header(checksum=b"")), "checksum", 2),
}


def offers(count: int) -> Lie:
    return lambda connection, _, patience: connection.send_frame(Offer(count), patience)


def endless(connection: Connection, request: Read, patience: Patience) -> None:
    connection.send_frame(Offer(request.stop), patience)
    block, payload = true_block(request, 0)
    while True:
        connection.send_frame(block, patience, memoryview(payload))


def garbage(connection: Connection, request: Read, patience: Patience) -> None:
    del request
    connection.send(patience, random.Random(1).randbytes(10_000))


def sealed_garbage(body: bytes) -> Lie:
    def lie(connection: Connection, request: Read, patience: Patience) -> None:
        del request
        assert connection.session is not None
        connection.send(patience, LENGTH.pack(len(body)) + connection.session.seal(body) + body)

    return lie


def a_frame_without_end(connection: Connection, request: Read, patience: Patience) -> None:
    del request
    connection.send(patience, LENGTH.pack(2**32 - 1) + bytes(SEAL_BYTES))
    while True:
        connection.send(patience, bytes(65536))


LIES |= {
    "more than was asked for": (offers(9), "protocol", 0),
    "a negative offer": (sealed_garbage(encode(Offer(0)).replace(b"\0", b"\xff")), "protocol", 0),
    "another message": (lambda connection, _, patience: connection.send_frame(Welcome(), patience), "protocol", 0),
    "a stream without end": (endless, "order", 1),
    "garbage": (garbage, "size", 0),
    "garbage with a seal": (sealed_garbage(random.Random(2).randbytes(10_000)), "protocol", 0),
    "msgpack too deep": (sealed_garbage(b"\x91" * 10_000), "protocol", 0),
    "a frame without end": (a_frame_without_end, "size", 0),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_ends_the_pull_with_what_came_before(name: str) -> None:
    lie, reason, count = LIES[name]
    memory, want = ArrayMemory(8), wanted(8)
    with liar(lie) as source, reading(memory) as own:
        assert pull(own, source.endpoint, want, range(8), soon()) == count
        assert came(memory, want, range(8), count)
        assert own.counts.failures == {reason: 1}


def test_a_connection_on_which_more_comes_than_was_asked_for_is_not_used_again() -> None:
    def says_more(connection: Connection, request: Read, patience: Patience) -> None:
        lies_at(-1, with_header())(connection, request, patience)
        connection.send_frame(Offer(0), patience)
        more.set()

    more = threading.Event()
    with liar(says_more) as source, reading(ArrayMemory(8)) as own:
        assert pull(own, source.endpoint, wanted(8), range(8), soon()) == 8
        assert more.wait(SOON_S)
        assert pull(own, source.endpoint, wanted(8), range(8), soon()) == 8
        assert not own.counts.failures


def test_a_slow_source_gives_what_it_can_until_the_deadline() -> None:
    sent = threading.Semaphore(3)

    def slow(connection: Connection, request: Read, patience: Patience) -> None:
        connection.send_frame(Offer(request.stop), patience)
        for index in range(request.stop):
            if not sent.acquire(timeout=SOON_S):
                return
            block, payload = true_block(request, index)
            connection.send_frame(block, patience, memoryview(payload))

    with liar(slow) as source, reading(ArrayMemory(8)) as own:
        began_s = time.monotonic()
        assert pull(own, source.endpoint, wanted(8), range(8), began_s + 0.5) == 3
        assert time.monotonic() - began_s < SOON_S / 2
        assert own.counts.failures == {"deadline": 1}
        sent.release(8)


# ---- the reader does


@pytest.fixture
def serving() -> Iterator[ServingEngine]:
    engine = ServingEngine(128, MEGABYTE, share=1.0, handshake_s=0.3, stall_s=0.3)
    engine.serve(chain([*tokens_of(48), 1]))
    try:
        yield engine
    finally:
        engine.close()


def connect(engine: ServingEngine) -> socket.socket:
    host, port = engine.source.endpoint.removeprefix("tcp://").split(":")
    connected = socket.create_connection((host, int(port)), timeout=SOON_S)
    connected.settimeout(SOON_S)
    return connected


def is_closed(connected: socket.socket) -> bool:
    """Return True once the source has closed the connection, whatever it said before."""
    connected.settimeout(SOON_S)
    with suppress(ConnectionError):
        while connected.recv(65536):
            pass
    return True


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100, random.Random(3).randbytes(10_000), bytes(10_000)],
    ids=["nothing", "http", "noise", "zeros"],
)
def test_what_is_no_reader_is_shut_out(serving: ServingEngine, said: bytes) -> None:
    with connect(serving) as stranger:
        with suppress(ConnectionError):
            stranger.sendall(said)
        assert is_closed(stranger)
    wait_until(lambda: not serving.source.readers, "its thread has ended")
    assert sum(serving.source.counts.failures.values()) == 1


def handshake(connected: socket.socket, secret: bytes = SECRET) -> tuple[bytes, Connection]:
    """Return what a listener would have seen of the reader, and the connection."""
    connection, patience = Connection(connected), Patience(soon())
    reply, session = reply_to(secret, connection.receive(CHALLENGE_BYTES, patience))
    connection.send(patience, reply)
    connection.session = session
    return reply, connection


def test_a_handshake_that_a_listener_recorded_is_worth_nothing(serving: ServingEngine) -> None:
    with connect(serving) as first:
        reply, connection = handshake(first)
        assert connection.receive_frame(MAX_ANSWER_BYTES, Patience(soon()))
    with connect(serving) as second:
        second.sendall(reply)
        assert is_closed(second)
    wait_until(lambda: serving.source.counts.failures["proof"] == 1, "the source has counted it")


def request_for(blocks: int) -> Read:
    return read_of(wanted(blocks), neighbour_config(), SOON_S)


def test_a_request_that_a_listener_recorded_is_worth_nothing(serving: ServingEngine) -> None:
    """It was sealed for another session, and in its own session it is not the next one."""
    with connect(serving) as connected:
        _, connection = handshake(connected)
        assert connection.session is not None
        body = encode(request_for(1))
        frame = LENGTH.pack(len(body)) + connection.session.seal(body) + body
        patience = Patience(soon())
        connection.receive_frame(MAX_ANSWER_BYTES, patience)
        connection.send(patience, frame)
        connection.receive_frame(MAX_ANSWER_BYTES, patience)  # the offer
        connection.send(patience, frame)
        assert is_closed(connected)
    wait_until(lambda: serving.source.counts.failures["proof"] == 1, "the source has counted it")
    assert serving.source.counts.blocks == 1


def test_a_reader_that_stops_reading_costs_a_lease(serving: ServingEngine) -> None:
    with connect(serving) as connected:
        _, connection = handshake(connected)
        connection.send_frame(request_for(48), Patience(soon()))
        wait_until(lambda: serving.holds.held == 48, "its blocks are held")
        wait_until(lambda: not serving.source.readers, "the source gives it up")
        wait_until(lambda: not serving.holds.held, "its blocks are given back")
    assert serving.source.counts.failures == {"stalled": 1}
    assert 0 < serving.source.counts.blocks < 48


def test_readers_beyond_the_limit_are_refused() -> None:
    engine = ServingEngine(64, most_readers=2)
    try:
        with connect(engine) as first, connect(engine) as second, connect(engine) as third:
            handshake(first), handshake(second)
            assert is_closed(third)
            assert engine.source.counts.failures == {"full": 1}
    finally:
        engine.close()


REQUESTS: dict[str, Callable[[Read], bytes]] = {
    "tokens missing": lambda request: encode(replaced(request, prompt=request.prompt[:-1])),
    "tokens too many": lambda request: encode(replaced(request, prompt=request.prompt * 2)),
    "nothing": lambda request: encode(replaced(request, start=request.stop)),
    "a start behind the stop": lambda request: encode(replaced(request, start=request.stop + 1)),
}


def replaced(request: Read, **changes: object) -> Read:
    return msgspec.structs.replace(request, **changes)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_makes_no_sense_is_told_so(serving: ServingEngine, name: str) -> None:
    with connect(serving) as connected:
        _, connection = handshake(connected)
        body, patience = REQUESTS[name](request_for(4)), Patience(soon())
        assert connection.session is not None
        connection.send(patience, LENGTH.pack(len(body)) + connection.session.seal(body) + body)
        connection.receive_frame(MAX_ANSWER_BYTES, patience)
        assert b"invalid" in connection.receive_frame(MAX_ANSWER_BYTES, patience)
    assert serving.source.counts.failures["invalid"] == 1


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91" * 10_000, random.Random(4).randbytes(10_000), encode(Block(0, b"", None, b"", 0))]
)
def test_a_reader_that_sends_garbage_with_a_seal_is_shut_out(serving: ServingEngine, body: bytes) -> None:
    with connect(serving) as connected:
        _, connection = handshake(connected)
        assert connection.session is not None
        connection.send(Patience(soon()), LENGTH.pack(len(body)) + connection.session.seal(body) + body)
        assert is_closed(connected)
    wait_until(lambda: serving.source.counts.failures == {"protocol": 1}, "the source has counted it")
