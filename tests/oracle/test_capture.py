"""Frames captured from real publishers: a late subscriber that asks for a replay ends with the true resident set."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pytest

from events.cache.resolver import Resolver
from events.stream.actions import Replay
from events.stream.foreign_stream import ForeignStream
from events.view import CacheView
from tests.events.resident import copies
from tests.oracle.vectors import Record, clears, file_params, read, resident_copies

END = 2**64 - 1
NOW = 0.0
ENOUGH_REQUESTS = 5

Batch: TypeAlias = tuple[int, bytes]
Answer: TypeAlias = Callable[[int], list[Batch]]

each_capture = pytest.mark.parametrize("path", file_params("live_capture*.jsonl"))


@dataclass
class Capture:
    """Batches at a subscriber; `replies` holds the recorded answers by the requested sequence number."""

    published: int
    buffer_batches: int
    live: list[Batch]
    replies: dict[int, list[Batch]]

    @property
    def received(self) -> dict[int, bytes]:
        """Every batch that came by any way."""
        return dict(sorted([*self.live, *self.answer(0)]))

    def answer(self, start: int) -> list[Batch]:
        if start in self.replies:
            return self.replies[start]
        return [batch for batch in self.replies.get(0, []) if batch[0] >= start]

    def until(self, published: int) -> "Capture":
        """The capture of the same subscriber, had the publisher stopped earlier."""
        kept = [one for one in self.received.items() if published - self.buffer_batches <= one[0] < published]
        return Capture(published, self.buffer_batches, [one for one in self.live if one[0] < published], {0: kept})

    def moments(self) -> "list[Capture]":
        """The capture as recorded, and cut after every live batch: its last state alone may be an empty cache."""
        return [self.until(seq + 1) for seq, _ in self.live[:-1]] + [self]

    @property
    def complete(self) -> bool:
        """Return True if no batch is missing since the last clear of the whole cache."""
        start = max((seq for seq, payload in self.received.items() if clears(payload)), default=0)
        return all(seq in self.received for seq in range(start, self.published))


def load(path: Path) -> Capture:
    live: list[Batch] = []
    starts: dict[str, int] = {}
    replies: dict[int, list[Batch]] = {}
    meta: Record = {}
    for record in read(path):
        match record["kind"]:
            case "meta":
                meta = record
            case "live":
                live.append(batch(record))
            case "replay_request" if is_proper_request(record):
                starts[record["label"]] = start = int(record["frames"][1], 16)
                replies[start] = []
            case "replay_reply" if record["label"] in starts:
                replies[starts[record["label"]]].append(batch(record))
    for answer in replies.values():
        assert answer.pop()[0] == END, "a recorded replay has no end marker"
    return Capture(meta["published"], meta["buffer_steps"], live, replies)


def is_proper_request(record: Record) -> bool:
    """Return True for a DEALER's [empty, 8-byte start]; the others were recorded to show the publisher's reaction."""
    frames = record["frames"]
    return record["socket"] == "DEALER" and len(frames) == 2 and frames[0] == "" and len(frames[1]) == 16


def batch(record: Record) -> Batch:
    """Live [topic, seq, payload]; replayed [empty, topic, seq, payload], before vLLM 0.26 [empty, seq, payload]."""
    *_, seq, payload = record["frames"]
    return int(seq, 16), bytes.fromhex(payload)


class Reader:
    """A view of one capture, and the requests it has still to get an answer to."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.view = CacheView("capture", ForeignStream(), Resolver())
        self.requests = self.view.perform(self.view.stream.connected(NOW))

    def live(self, batches: Iterable[Batch]) -> None:
        for seq, payload in batches:
            self.requests += self.view.perform(self.view.stream.live(seq, payload, NOW))

    def answer(self, reply: Answer | None = None, *, meanwhile: Iterable[Batch] = ()) -> None:
        """Answers request after request, until there are none."""
        asked = 0
        while self.requests:
            request = self.requests.pop(0)
            assert isinstance(request, Replay)
            asked += 1
            assert asked <= ENOUGH_REQUESTS, f"unexpected request: {request}"
            for seq, payload in (reply or self.capture.answer)(request.start):
                self.requests += self.view.perform(self.view.stream.replayed(seq, payload, NOW))
            self.live(meanwhile)
            meanwhile = ()
            self.requests += self.view.perform(self.view.stream.replay_ended(NOW))


def assert_knows_all_that_was_received(reader: Reader) -> None:
    capture, view = reader.capture, reader.view
    view.resolver.check()
    assert view.stream.next_seq == capture.published
    assert copies(view.resolver) == resident_copies(capture.received.values())
    assert (view.inexact is None) == capture.complete, view.inexact


@each_capture
def test_replay_after_the_live_frames_gives_the_resident_set(path: Path) -> None:
    for capture in load(path).moments():
        reader = Reader(capture)
        reader.live(capture.live)
        reader.answer()
        assert_knows_all_that_was_received(reader)


@each_capture
def test_replay_between_live_frames_gives_the_resident_set(path: Path) -> None:
    for capture in load(path).moments():
        reader = Reader(capture)
        replayed = dict(capture.answer(0))
        late = [one for one in capture.live[len(capture.live) // 2 :] if one[0] in replayed]
        reader.live(one for one in capture.live if one not in late)
        reader.answer(meanwhile=late)
        assert_knows_all_that_was_received(reader)


@each_capture
def test_live_frames_that_were_replayed_already_change_nothing(path: Path) -> None:
    reader = Reader(load(path))
    reader.answer()
    before = copies(reader.view.resolver)
    replayed = dict(reader.capture.answer(0))
    reader.live(one for one in reader.capture.live if one[0] in replayed)
    assert (reader.requests, copies(reader.view.resolver)) == ([], before)


@each_capture
def test_without_its_replay_the_view_is_exact_only_after_a_clear(path: Path) -> None:
    for capture in load(path).moments():
        silent = replace(capture, replies={0: []})
        reader = Reader(silent)
        reader.live(silent.live)
        reader.answer()
        assert_knows_all_that_was_received(reader)


@each_capture
def test_batches_lost_for_good_are_declared_and_leave_no_claim_that_is_wrong(path: Path) -> None:
    rng = random.Random(path.name)
    for capture in load(path).moments():
        *candidates, _ = capture.received  # the loss of the very last one cannot be detected
        lost = set(rng.sample(candidates, min(len(candidates), rng.choice([1, 2, 5, 20]))))
        holed = replace(
            capture,
            live=[one for one in capture.live if one[0] not in lost],
            replies={0: [one for one in capture.answer(0) if one[0] not in lost]},
        )
        reader = Reader(holed)
        reader.live(holed.live)
        reader.answer()
        view, resident = reader.view, resident_copies(capture.received.values())
        view.resolver.check()
        assert view.stream.next_seq == holed.published
        assert (view.inexact is None) == holed.complete, view.inexact
        for pool, blocks in copies(view.resolver).items():
            assert blocks.keys() <= resident[pool].keys(), "it claims blocks that are gone"
