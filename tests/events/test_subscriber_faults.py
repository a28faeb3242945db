"""The subscriber's sockets when something fails or is closed at an awkward time, and the order they are read in."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

from events.cache.resolver import Resolver
from events.messages import EventBatch, Frames, encode_batch
from events.native import Load
from events.publisher import END_OF_REPLAY, Publisher
from events.sockets.curve import CurveClient, load_curve, write_keys
from events.source import Source
from events.stream.actions import Action, Apply, Gap
from events.subscriber import Subscriber, _Sockets
from events.view import CacheView
from tests.events.test_subscriber import config, native, stored, until

ANY = "tcp://127.0.0.1:0"
PLAIN = Source("x", "tcp://127.0.0.1:1")


@pytest.fixture
async def context() -> AsyncIterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def batch(*numbers: int) -> bytes:
    return encode_batch(EventBatch(0.0, [stored(number) for number in numbers]))


def event(seq: int, payload: bytes) -> Frames:
    return [b"", seq.to_bytes(8, "big"), payload]


def applied(into: list[int]) -> Callable[[Action, EventBatch | None], None]:
    def note(action: Action, _: EventBatch | None) -> None:
        if isinstance(action, Apply):
            into.append(action.seq)

    return note


class Wire:
    """The bound ends of one foreign replica, moved by hand."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.events = context.socket(zmq.XPUB)  # it sees who subscribes
        self.replay = context.socket(zmq.ROUTER)
        for socket in (self.events, self.replay):
            socket.linger = 0
        self.events.bind(ANY)
        self.replay.bind(ANY)
        self.context = context
        self.endpoint = self.events.getsockopt_string(zmq.LAST_ENDPOINT)
        self.source = Source("x", self.endpoint, self.replay.getsockopt_string(zmq.LAST_ENDPOINT), model="m")

    async def subscribed(self) -> None:
        await until(lambda: bool(self.events.poll(0)))
        self.events.recv()

    async def asked(self) -> tuple[bytes, int]:
        """The peer that asks for a replay, and the batch it asks from."""
        await until(lambda: bool(self.replay.poll(0)))
        peer, _, start = self.replay.recv_multipart()
        return peer, int.from_bytes(start, "big")

    def answer(self, peer: bytes, *frames: Frames) -> None:
        for part in frames:
            self.replay.send_multipart([peer, b"", b"", *part[-2:]])

    def close(self) -> None:
        self.events.close()
        self.replay.close()

    def restart(self) -> None:
        self.events.close()
        self.events = self.context.socket(zmq.XPUB)
        self.events.linger = 0
        wait_until(self._bound)

    def _bound(self) -> bool:
        try:
            self.events.bind(self.endpoint)
        except zmq.ZMQError:  # the old socket is closed in the background
            return False
        return True


@pytest.fixture
async def wire(context: "zmq.Context[zmq.Socket[bytes]]") -> AsyncIterator[Wire]:
    with closing(Wire(context)) as wire:
        yield wire


def wait_until(condition: Callable[[], bool]) -> None:
    """Without giving the loop its turn."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline


def open_sockets(context: "zmq.Context[zmq.Socket[bytes]]") -> list["zmq.Socket[bytes]"]:
    return [socket for socket in context._sockets if not socket.closed]


def sockets_of(context: "zmq.Context[zmq.Socket[bytes]]", source: Source) -> _Sockets:
    owner = cast(Subscriber, SimpleNamespace(_context=context, _clock=time.monotonic))
    return _Sockets(owner, source, source.view(), None)


# ---- closing


@pytest.mark.parametrize("curve", [False, True])
async def test_links_that_are_closed_leave_nothing_behind(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path, curve: bool
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    keys = load_curve(str(write_keys(str(tmp_path / "key"))[1]))
    source = msgspec.structs.replace(
        PLAIN,
        status="tcp://localhost:1",
        snapshot=PLAIN.events,
        curve=CurveClient(keys.public, keys.public, keys.secret) if curve else None,
    )
    sockets = sockets_of(context, source)
    sockets.resync("a test")
    await asyncio.sleep(0)
    sockets.close()
    assert not open_sockets(context)
    context.destroy(linger=0)
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "but for what the loop keeps to look up names"


@pytest.mark.parametrize("field", ["events", "replay", "status", "snapshot"])
@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "tcp://nonsense", "tcp://a:0", "tcp://a:65536", "tcp://*:1", "tcp://a b:1", "udp://a:1", "inproc://a"),
        *("tcp://eth0;a:1", "ipc://", "ipc://" + "x" * 108),
    ],
)
async def test_an_endpoint_that_cannot_be_is_refused(field: str, endpoint: str) -> None:
    native = Source("x", "tcp://a:1", "ipc:///a", "ipc://@a", "tcp://[::1]:1")
    native.check()
    async with Subscriber() as subscriber:
        with pytest.raises(ValueError, match=f"x: {field} is '.*'; write tcp://HOST:PORT"):
            subscriber.add(msgspec.structs.replace(native, **{field: endpoint}))


# ---- removed by a callback


def removed_at(where: str, subscriber: Subscriber, source: Source) -> tuple[CacheView, dict[str, Any]]:
    def remove(*_: object) -> None:
        if subscriber._sockets:
            subscriber.remove(source.name)

    def at_gap(action: Action, _: EventBatch | None) -> None:
        if isinstance(action, Gap):
            remove()

    def tap(socket: str, _: Frames) -> None:
        if socket == where:
            remove()

    view = CacheView(
        source.name,
        source.stream(),
        Resolver("m", native=True),
        on_change=remove if where == "change" else None,
        on_action=at_gap if where == "gap" else remove if where == "action" else None,
    )
    return view, {"on_status": remove} if where == "on_status" else {"tap": tap}


@pytest.mark.parametrize("where", ["action", "gap", "change", "on_status", "connected", "snapshot", "events", "tick"])
async def test_a_replica_removed_by_a_callback_is_closed_for_good(where: str) -> None:
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    with Publisher(config()) as publisher:
        publisher.publish([stored(1)])
        source = native(publisher)
        if where == "tick":
            source = msgspec.structs.replace(source, snapshot="tcp://127.0.0.1:1")  # it never answers
        async with Subscriber() as subscriber:
            view, options = removed_at(where, subscriber, source)
            subscriber.add(source, view, **options)
            if where == "gap":
                await until(lambda: view.inexact is None)
                publisher.seq += 5  # five lost batches
            number = 2
            deadline = time.monotonic() + 10
            while subscriber._sockets:
                assert time.monotonic() < deadline
                publisher.publish([stored(number := number + 1)])
                publisher.report(Load())
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)  # whatever the callback has left behind
            assert not open_sockets(subscriber._context)
    assert not failed


# ---- order


async def test_a_reconnect_is_seen_between_what_came_before_it_and_after_it(wire: Wire) -> None:
    tapped: list[tuple[str, Frames]] = []
    async with Subscriber() as subscriber:
        subscriber.add(wire.source, tap=lambda socket, frames: tapped.append((socket, frames)))
        await wire.subscribed()
        old, new = [event(seq, batch(seq)) for seq in range(5)], event(0, batch(9))
        for frames in old:
            wire.events.send_multipart(frames)
        await until(lambda: ("events", old[-1]) in tapped)
        wire.restart()
        await wire.subscribed()
        wire.events.send_multipart(new)
        await until(lambda: ("events", new) in tapped)
        order = [
            frames if socket == "events" else socket for socket, frames in tapped if socket not in ("replay", "tick")
        ]
        assert order == ["connected", *old, "disconnected", "connected", new]


async def test_replies_to_an_older_request_never_come_in(wire: Wire) -> None:
    replies: list[Frames] = []

    def tap(socket: str, frames: Frames) -> None:
        if socket == "replay":
            replies.append(frames)

    async with Subscriber() as subscriber:
        subscriber.add(wire.source, tap=tap)
        await wire.subscribed()
        first, _ = await wire.asked()
        wire.answer(first, event(0, batch(0)))  # and no end
        await until(lambda: len(replies) == 1)
        second, _ = await wire.asked()  # it was waited for in vain
        wire.answer(first, event(1, batch(666)))
        wire.answer(second, event(0, batch(0)), event(1, batch(1)), [*END_OF_REPLAY])
        await until(lambda: replies[-1][-2:] == [*END_OF_REPLAY[1:]])
    assert second != first
    assert [frames[-1] for frames in replies] == [batch(0), batch(0), batch(1), b""]
