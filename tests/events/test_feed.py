"""Frames that are not what they should be, and a replica that changes its model."""

import logging

import msgspec
import pytest

from events.feed import Feed
from events.native import SnapshotHeader, encode_native
from events.resolver import Resolver
from events.stream import Stream, StreamConfig
from events.view import CacheView


def native_feed(model: str = "") -> Feed:
    feed = Feed(CacheView("r", Stream(StreamConfig(native=True)), Resolver(model, native=True)))
    feed.connected(0.0)
    return feed


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
def test_strange_frames_are_said_and_ignored(
    socket: str, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    feed = native_feed()
    with caplog.at_level(logging.WARNING):
        assert feed.receive(socket, frames, 0.0) == []
    assert f"a message on the {socket} socket" in caplog.text
    assert not feed.view.stream.exact


def test_the_model_follows_the_replica_unless_it_was_given() -> None:
    told, untold = native_feed("given"), native_feed()
    for model in ("one", "two"):
        for feed in (told, untold):
            feed.connected(1.0)
            feed.asked("snapshot")
            feed.receive("snapshot", [b"", msgspec.msgpack.encode(SnapshotHeader(1, 1, 0.0, 0, model))], 1.0)
        assert (told.view.resolver.model, untold.view.resolver.model) == ("given", model)
