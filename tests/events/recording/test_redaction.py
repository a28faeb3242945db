"""Redacted recordings: no token, salt or name is left in the file, and every key and every number is."""

import random
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from events.blocks import block_keys, root_key
from events.cache.hash_chain import pickled
from events.cache.pool import fold
from events.messages import BlockRemoved, BlockStored, EventBatch, Hash, KnownEvent, decode_batch, encode_batch
from events.native import Load, SnapshotHeader, Status, encode_native
from events.recording.recording import Recorder, Recording, feed_record, redacted_copy
from events.recording.redaction import HOLD_S
from events.source import Record, Source
from events.view import CacheView
from tests.events.cache.test_groups import TOKENS, ahead_of, block_keys_ahead, digests
from tests.events.cache.test_groups import stored as grouped
from tests.events.recorded import (
    SOURCE,
    TOPIC,
    Engine,
    indexes,
    record_incident,
    record_payloads,
    replay_into_view,
)

SECRETS = [b"secret-lora", b"secret-session", b"secret-image", b"secret-salt", b"secret-embed"]


def leaks(content: bytes, engine: Engine) -> list[object]:
    """The tokens (as msgpack or packed, either way round) and strings that are found in a file."""
    found: list[object] = [secret for secret in SECRETS if secret in content]
    for token in engine.tokens:
        forms = (msgspec.msgpack.encode(token), struct.pack("<I", token), struct.pack(">I", token))
        found += [token for form in forms if form in content]
    return found


def states(recording: Recording) -> list[tuple[object, ...]]:
    """The view's state after each record."""
    view = recording.sources[0].view()
    found: list[tuple[object, ...]] = []
    for record in recording.records():
        feed_record(view, record)
        facts = view.inexact, view.resolver.resident_blocks(), msgspec.to_builtins(view.stream.stats)
        stats = {name: value for name, value in facts[2].items() if name != "payload_bytes"}
        found.append((record.time, record.kind, view.resolver.keys(), facts[0], facts[1], stats))
    return found


@pytest.mark.parametrize("live", [True, False])
def test_no_token_or_salt_is_left(tmp_path: Path, live: bool) -> None:
    engine = record_incident(tmp_path / "a.wre", redact=live, secrets=True)
    if not live:
        assert len(set(leaks((tmp_path / "a.wre").read_bytes(), engine))) > len(engine.tokens) * 0.9
        redacted_copy(Recording(tmp_path / "a.wre"), tmp_path / "r.wre")
    content = (tmp_path / ("a.wre" if live else "r.wre")).read_bytes()
    assert leaks(content, engine) == []


@pytest.mark.parametrize("seed", range(5))
def test_keys_and_structure_are_left_at_every_moment(tmp_path: Path, seed: int) -> None:
    record_incident(tmp_path / "a.wre", seed=seed + 1, secrets=True)
    original = Recording(tmp_path / "a.wre")
    redacted_copy(original, tmp_path / "r.wre")
    redacted = Recording(tmp_path / "r.wre")
    assert redacted.header.redacted
    before, after = states(original), states(redacted)
    assert before[-1][2]
    # Time and kind of every record, the keys, the reason why it is inexact, the number of blocks, gaps and the like.
    assert after == before


def test_redacting_while_recording_gives_the_same_as_afterwards(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    record_incident(tmp_path / "r.wre", redact=True)
    assert states(Recording(tmp_path / "r.wre")) == states(Recording(tmp_path / "a.wre"))


def chain(tokens: list[int], root: int) -> list[int]:
    return block_keys(tokens, 4, root)


def event(hashes: list[Hash], parent: Hash | None, tokens: list[int]) -> BlockStored:
    return BlockStored(hashes, parent, tokens, 4, None, "GPU", None)


def live(seq: int, time: float, *events: BlockStored | BlockRemoved) -> Record:
    return Record(time, 0, "events", [TOPIC, seq.to_bytes(8, "big"), encode_batch(EventBatch(time, list(events)))])


def redacted_events(path: Path, records: list[Record]) -> list[list[object]]:
    """The events as a redacting recorder writes them."""
    with Recorder(path, [SOURCE], redact=True) as recorder:
        for record in records:
            recorder.write(record)
    return [
        list(decode_batch(record.frames[2]).events) for record in Recording(path).records() if record.seq is not None
    ]


def test_a_batch_waits_for_the_lost_one_that_names_its_parent(tmp_path: Path) -> None:
    tokens = list(range(100, 108))
    first = live(0, 10.0, event([b"one"], None, tokens[:4]))
    second = live(1, 10.1, event([b"two"], b"one", tokens[4:]))
    repaired = Record(11.0, 0, "replay", [b"", TOPIC, (0).to_bytes(8, "big"), first.frames[2]])
    [[found]] = redacted_events(tmp_path / "a.wre", [second, repaired])
    assert isinstance(found, BlockStored)
    one, two = chain(tokens, root_key("m", None, None, 4))
    assert (found.parent_block_hash, found.block_hashes) == (one, [two])


def test_a_parent_that_never_comes_gets_a_lasting_name(tmp_path: Path) -> None:
    tokens = list(range(100, 108))
    child = live(1, 10.0, event([b"two"], b"one", tokens[4:]))
    nothing = Record(10.0 + HOLD_S, 0, "tick", [])
    late = live(2, 11.0 + HOLD_S, event([b"one"], None, tokens[:4]))
    grandchild = live(3, 12.0 + HOLD_S, event([b"three"], b"two", tokens[:4]), BlockRemoved([b"one", b"two"], "GPU"))
    events = redacted_events(tmp_path / "a.wre", [child, nothing, late, grandchild])
    (two,), (one,), (three, removed) = events
    assert isinstance(one, BlockStored)
    assert isinstance(two, BlockStored)
    assert isinstance(three, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert [two.parent_block_hash] == one.block_hashes
    assert [three.parent_block_hash] == two.block_hashes
    assert removed.block_hashes == [*one.block_hashes, *two.block_hashes]
    assert one.block_hashes != chain(tokens, root_key("m", None, None, 4))[:1]


def test_the_same_payload_is_always_redacted_to_the_same_bytes(tmp_path: Path) -> None:
    orphan = live(5, 10.0, event([b"two"], b"one", [1, 2, 3, 4]))
    payload = orphan.frames[2]
    nothing = Record(10.0 + HOLD_S, 0, "tick", [])
    root = live(6, 11.0 + HOLD_S, event([b"one"], None, [5, 6, 7, 8]))
    again = Record(12.0 + HOLD_S, 0, "replay", [b"", TOPIC, (5).to_bytes(8, "big"), payload])
    with Recorder(tmp_path / "a.wre", [SOURCE], redact=True) as recorder:
        for record in (orphan, nothing, root, again):
            recorder.write(record)
    first, _, _, second = Recording(tmp_path / "a.wre").records()
    assert first.frames[-1] == second.frames[-1] != payload


def test_what_cannot_be_read_stays_unreadable_and_is_blanked(tmp_path: Path) -> None:
    unreadable = {"type": "BlockStored", "token_ids": ["secret-salt"]}
    unknown = {"type": "FutureEvent", "salt": "secret-salt"}
    payload = msgspec.msgpack.encode([1.0, [unreadable, unknown], None])
    written = [
        Record(1.0, 0, "events", [TOPIC, bytes(8), payload]),
        Record(1.0, 0, "events", [TOPIC, bytes(8), b"secret-salt"]),
        Record(1.0, 0, "events", [b"secret-salt"]),
        Record(1.0, 0, "replay", [b"secret-salt"] * 5),
        Record(1.0, 0, "snapshot", [b"secret-salt"] * 3),
    ]
    with Recorder(tmp_path / "a.wre", [SOURCE], redact=True) as recorder:
        for record in written:
            recorder.write(record)
    assert b"secret" not in (tmp_path / "a.wre").read_bytes()
    read = list(Recording(tmp_path / "a.wre").records())
    kinds = [type(one).__name__ for one in decode_batch(read[0].frames[2]).events]
    assert kinds == ["RejectedEvent", "UnknownEvent"]
    assert [len(frame) for frame in read[3].frames] == [11] * 5
    with pytest.raises(ValueError, match="not msgpack"):
        decode_batch(read[1].frames[2])


def test_a_native_stream_keeps_its_hashes_digests_and_snapshots(tmp_path: Path) -> None:
    source = Source("n", "tcp://n:1", status="tcp://n:2", snapshot="tcp://n:3", model="m")
    tokens = random.Random(1).sample(range(2**24, 2**31), 12)
    keys: list[Hash] = [*chain(tokens, root_key("m", None, None, 4))]
    batch = encode_batch(EventBatch(1.0, [event(keys[:2], None, tokens[:8])]))
    status = Status(9, 5, 1.0, 3, fold(keys), Load())
    payload = encode_batch(EventBatch(1.0, [event(keys[2:], keys[1], tokens[8:])]))
    written = [
        Record(1.0, 0, "connected", []),
        Record(1.1, 0, "snapshot", [b"", encode_native(SnapshotHeader(9, 4, 1.0, 1))]),
        Record(1.1, 0, "snapshot", [b"", batch]),
        Record(1.2, 0, "events", [TOPIC, (5).to_bytes(8, "big"), payload]),
        Record(1.3, 0, "status", [TOPIC, encode_native(status)]),
    ]
    with Recorder(tmp_path / "a.wre", [source], redact=True) as recorder:
        for record in written:
            recorder.write(record)
    engine = Engine()
    engine.tokens = set(tokens)
    assert leaks((tmp_path / "a.wre").read_bytes(), engine) == []
    view: CacheView = replay_into_view(Recording(tmp_path / "a.wre"), source)
    assert view.inexact is None
    assert view.resolver.keys() == set(keys)
    assert view.stream.stats.digests_compared == 1


# ---- groups

NAMES = digests(pickled, TOKENS)


def ahead(event: BlockStored, blocks: int) -> BlockStored:
    event.lookahead_token_ids = ahead_of(TOKENS, 0, blocks, 1)
    return event


def offloaded(event: BlockStored) -> BlockStored:
    event.medium = "CPU"
    return event


def salted(event: BlockStored) -> BlockStored:
    event.cache_salt = "secret-salt"
    return event


FULL, WINDOW = "full_attention", "sliding_window"
# Batches, and by pool the blocks of the prompt that are held in the end, counted from 1.
GROUPS: dict[str, tuple[Sequence[Sequence[KnownEvent]], dict[tuple[str, int], list[int]]]] = {
    "a window that names the last blocks": (
        [[grouped([1, 2, 3, 4], TOKENS[:8], 0, FULL), grouped([3, 4], TOKENS[:8], 1, WINDOW, 4)]],
        {("GPU", 0): [1, 2, 3, 4], ("GPU", 1): [3, 4]},
    ),
    "a window that comes first": (
        [[grouped([3, 4], TOKENS[:8], 0, WINDOW, 4), grouped([1, 2, 3, 4], TOKENS[:8], 1, FULL)]],
        {("GPU", 0): [3, 4], ("GPU", 1): [1, 2, 3, 4]},
    ),
    "a window that loses a block": (
        [
            [grouped([1, 2, 3], TOKENS[:6], 0, FULL), grouped([1, 2, 3], TOKENS[:6], 1, WINDOW, 4)],
            [BlockRemoved([1], "GPU", 1)],
        ],
        {("GPU", 0): [1, 2, 3], ("GPU", 1): [2, 3]},
    ),
    "states in larger blocks": (
        [[grouped([1, 2, 3, 4], TOKENS[:8], 0, FULL), grouped([2, 4], TOKENS[:8], 1, "mamba", size=4)]],
        {("GPU", 0): [1, 2, 3, 4], ("GPU", 1): [2, 4]},
    ),
    "a window alone": (
        [
            [grouped(NAMES[1:3], TOKENS[:8], 0, WINDOW, 4)],
            [grouped([], TOKENS[8:10], 0, WINDOW, 4, parent=NAMES[3])],
            [grouped(NAMES[5:], TOKENS[10:], 0, WINDOW, 4, parent=NAMES[4])],
        ],
        {("GPU", 0): [2, 3, 6]},
    ),
    "a lower medium without salts": (
        [
            [salted(grouped([1, 2], TOKENS[:4], 0, None))],
            [offloaded(grouped([1, 2, 3], TOKENS[:6], 0, None)), BlockRemoved([1, 2], "GPU")],
        ],
        {("CPU", 0): [1, 2, 3]},
    ),
}


@pytest.mark.parametrize(("batches", "held"), GROUPS.values(), ids=GROUPS)
def test_a_redacted_recording_of_groups_replays_to_the_same_index(
    tmp_path: Path, batches: Sequence[Sequence[KnownEvent]], held: dict[tuple[str, int], list[int]]
) -> None:
    payloads = [encode_batch(EventBatch(0.0, [*events])) for events in batches]
    original, redacted = record_payloads(tmp_path, payloads)
    before, after = indexes(original), indexes(redacted)
    assert after == before
    salt = "secret-salt" if ("CPU", 0) in held else None
    keys = block_keys(TOKENS, 2, root_key("m", None, salt, 2))
    assert after[-1][0] == {name: {keys[block - 1] for block in blocks} for name, blocks in held.items()}
    assert after[-1][2] is None


def test_a_redacted_recording_keeps_what_hashes_look_ahead_to(tmp_path: Path) -> None:
    pairs = list(pairwise(TOKENS))
    for events in ([ahead(grouped([1, 2], TOKENS[:4], 0, FULL), 2)], [grouped([1, 2], pairs[:4], 0, None)]):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        original, redacted = record_payloads(folder, [encode_batch(EventBatch(0.0, [*events]))])
        [*_, (held, layout, inexact)] = indexes(redacted)
        assert layout is not None and layout.lookahead == 1 and inexact is None
        assert held == {("GPU", 0): set(block_keys_ahead(TOKENS, 1)[:2])} and indexes(original) == indexes(redacted)
