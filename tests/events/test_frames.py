"""Malformed frames, and a replica that changes its model."""

import logging

import msgspec
import pytest

from events.blocks import block_keys, root_key
from events.cache.resolver import Resolver
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KnownEvent, encode_batch
from events.mirror import Mirror
from events.native import Load, SnapshotHeader, Status, encode_native
from events.stream.actions import Snapshot
from events.stream.native_stream import NativeStream
from events.stream.states import StreamConfig
from events.view import CacheView, Request


def native_view(model: str = "") -> CacheView:
    view = CacheView("r", NativeStream(), Resolver(model, native=True))
    view.receive("connected", [], 0.0)
    return view


@pytest.mark.parametrize(
    ("socket", "frames"),
    [
        ("events", [b"topic", b"short", b""]),
        ("events", [b"topic"]),
        ("replay", [b"", b""]),
        ("replay", [b"x", b"", bytes(8), b""]),
        ("status", [b"topic", b"\xc1"]),
        ("snapshot", [b"", b"\xc1"]),
        ("snapshot", [b""]),
        ("snapshot", [b"", encode_native(SnapshotHeader(1, 1, 0.0, 0, "mmmm")).replace(b"mmmm", b"\xff\xff\xff\xff")]),
    ],
)
def test_strange_frames_are_reported_and_ignored(
    socket: str, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    view = native_view()
    with caplog.at_level(logging.WARNING):
        assert view.receive(socket, frames, 0.0) == []
    assert f"a message on the {socket} socket" in caplog.text
    assert not view.stream.exact


def test_the_model_follows_the_replica_unless_it_was_given() -> None:
    told, untold = native_view("given"), native_view()
    for model in ("one", "two"):
        for view in (told, untold):
            view.receive("connected", [], 1.0)
            view.asked("snapshot")
            view.receive("snapshot", [b"", msgspec.msgpack.encode(SnapshotHeader(1, 1, 0.0, 0, model))], 1.0)
        assert (told.resolver.naming.model, untold.resolver.naming.model) == ("given", model)


ROOT = root_key("m", None, None, 1)


def block(number: int) -> int:
    """The key of the only block of a prompt."""
    return block_keys([number], 1, ROOT)[0]


class Replica:
    """A native replica that answers every snapshot request; it says how many it was sent."""

    def __init__(self, view: CacheView) -> None:
        self.view = view
        self.mirror = Mirror()
        self.seq = -1
        self.now_s = 0.0
        self.asked = 0
        self.incarnation = 1

    def holds(self, blocks: int) -> None:
        """Publish events that make it hold this many blocks."""
        held = sum(len(pool.blocks) for pool in self.mirror.pools.values())
        more: list[KnownEvent] = [
            BlockStored([block(number)], None, [number], 1, None, "GPU", None) for number in range(held, blocks)
        ]
        self.publish([*more, BlockRemoved([block(number) for number in range(blocks, held)], "GPU")])

    def publish(self, events: list[KnownEvent]) -> None:
        self.mirror.apply(events)
        self.seq += 1
        payload = encode_batch(EventBatch(0.0, list(events)))
        self.receive("events", [b"", self.seq.to_bytes(8, "big"), payload])

    def speaks(self, seconds: float) -> None:
        """Let time pass, with a status in each quarter of a second."""
        for _ in range(int(4 * seconds)):
            self.now_s += 0.25
            digest = self.mirror.digest()
            status = Status(self.incarnation, self.seq, 0.0, digest.blocks, digest.xor, Load())
            self.receive("status", [b"", encode_native(status)])
            self.answer(self.view.receive("tick", [], self.now_s))

    def receive(self, socket: str, frames: list[bytes]) -> None:
        self.answer(self.view.receive(socket, frames, self.now_s))

    def answer(self, requests: list[Request]) -> None:
        for request in requests:
            assert isinstance(request, Snapshot)
            self.asked += 1
            self.view.asked("snapshot")
            payloads = self.mirror.snapshot(0.0)
            header = SnapshotHeader(self.incarnation, self.seq, 0.0, len(payloads), "m")
            for part in (encode_native(header), *payloads):
                self.receive("snapshot", [b"", part])

    @property
    def inexact(self) -> str:
        return self.view.inexact or ""


@pytest.fixture
def replica() -> Replica:
    view = CacheView("r", NativeStream(StreamConfig(can_replay=False)), Resolver("m", native=True))
    replica = Replica(view)
    replica.holds(5)
    replica.answer(view.receive("connected", [], 0.0))
    return replica


def test_a_replica_with_more_blocks_than_are_kept_is_inexact_and_asked_once(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("events.cache.pools.MAX_BLOCKS", 100)
    replica.holds(150)
    replica.speaks(600)
    assert replica.asked == 1
    assert "more than 100 blocks" in replica.inexact
    assert replica.view.resolver.resident_blocks() == 100
    replica.publish([BlockRemoved([block(number) for number in range(60)], "GPU")])
    replica.speaks(60)
    assert (replica.asked, replica.inexact) == (2, ""), "frames left unread are read once there is room"


def test_a_replica_that_claims_more_than_its_pool_has_is_not_asked_again(replica: Replica) -> None:
    replica.view.resolver.capacity.limit(100)
    replica.holds(500)
    replica.speaks(600)
    assert replica.asked == 1
    assert "more than the 100 blocks" in replica.inexact
    replica.holds(90)
    replica.speaks(60)
    assert replica.inexact == ""


def test_a_loss_in_a_full_view_is_still_repaired(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("events.cache.pools.MAX_BLOCKS", 100)
    replica.holds(100)
    replica.speaks(10)
    assert (replica.asked, replica.inexact) == (1, "")
    replica.view.resolver.apply([BlockRemoved([block(7)], "GPU")])
    replica.speaks(60)
    assert (replica.asked, replica.inexact) == (2, "")


def test_a_snapshot_too_long_to_be_read_is_asked_for_twice_and_no_more(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("events.view.MAX_SNAPSHOT_BYTES", 1000)
    replica.holds(100)
    replica.answer(replica.view.receive("connected", [], replica.now_s))
    asked = replica.asked
    for blocks in range(100, 200, 2):
        replica.holds(blocks)
        replica.speaks(20)
    assert replica.asked == asked + 1
    assert "snapshot" in replica.inexact
    assert {block(197)} <= replica.view.resolver.keys(), "live batches are applied"
    assert caplog.text.count("snapshot is larger than") == 1
    replica.seq += 3  # and what is lost is not asked for
    replica.holds(210)
    replica.speaks(20)
    assert replica.asked == asked + 1
    assert {block(209)} <= replica.view.resolver.keys()
    replica.publish([AllBlocksCleared()])
    replica.speaks(20)
    assert replica.inexact == ""


@pytest.mark.parametrize("reason", ["connected again", "somebody asks for it", "a new incarnation"])
def test_a_snapshot_that_was_too_long_is_asked_for_again_when_there_is_a_reason(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr("events.view.MAX_SNAPSHOT_BYTES", 1000)
    replica.holds(100)
    replica.answer(replica.view.receive("connected", [], replica.now_s))
    replica.speaks(60)
    asked = replica.asked
    replica.holds(5)
    replica.speaks(60)
    assert replica.asked == asked
    if reason == "connected again":
        replica.answer(replica.view.receive("connected", [], replica.now_s))
    elif reason == "somebody asks for it":
        replica.answer(replica.view.perform(replica.view.stream.resync("doubted", replica.now_s)))
    else:
        replica.incarnation += 1
    replica.speaks(60)
    assert (replica.asked, replica.inexact) == (asked + 1, "")
