"""Every point of the grading: a clean stream passes, a planted violation is named, real captures pass."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.analysis.conformance import Conformance, Finding
from events.analysis.grading import Graded
from events.analysis.points import POINTS
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KnownEvent, encode_batch
from events.source import Source

VECTORS = Path(__file__).resolve().parents[2] / "data" / "vectors"
END = [b"", b"", b"\xff" * 8, b""]

Frames = list[bytes]


def stored(*hashes: int | bytes, parent: int | bytes | None = None, **changed: Any) -> BlockStored:
    """Blocks of two tokens; a block's tokens follow from its hash."""
    tokens = [token for h in hashes for token in (_token(h), 0)]
    event = BlockStored(list(hashes), parent, tokens, 2, None, "GPU", None)
    return msgspec.structs.replace(event, **changed)


def _token(block_hash: int | bytes) -> int:
    return block_hash if isinstance(block_hash, int) else block_hash[0]


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(list(hashes), "GPU")


def message(
    seq: int, *events: KnownEvent, ts: float | None = None, rank: int | None = 0, topic: bytes = b"t"
) -> Frames:
    payload = encode_batch(EventBatch(float(seq) if ts is None else ts, list(events), rank))
    return [topic, seq.to_bytes(8, "big"), payload]


def raw(seq: int, batch: object) -> Frames:
    return [b"t", seq.to_bytes(8, "big"), msgspec.msgpack.encode(batch)]


def clean(count: int = 4) -> list[Frames]:
    """Stores, a repeated store, a removal and a clear; then `count` more stores."""
    first = [
        message(0, stored(1, 2, extra_keys=[None, None]), stored(3, parent=2)),
        message(1, stored(1), removed(1), removed(3)),
        message(2, AllBlocksCleared()),
    ]
    return first + [message(seq, stored(seq + 10)) for seq in range(3, 3 + count)]


def replies(messages: list[Frames], start: int = 0) -> list[Frames]:
    return [[b"", *frames] for frames in messages if int.from_bytes(frames[1], "big") >= start]


class Grading:
    """A stream that is graded, its messages given by hand."""

    def __init__(self, *, can_replay: bool = True) -> None:
        source = Source("s", "tcp://a:1", "tcp://a:2" if can_replay else None)
        self._graded = Graded(source, can_replay=can_replay)
        self._graded.view.receive("connected", [], 0.0)
        self.grades = self._graded.grades

    def take(self, kind: str, *messages: Frames) -> None:
        for frames in messages:
            self._graded.received(kind, frames)
            self._graded.view.receive(kind, frames, 0.0)


def grade(live: list[Frames], *replays: tuple[int, list[Frames]], can_replay: bool = False) -> Conformance:
    """Live messages, then each replay as (start, everything that the socket answers)."""
    grading = Grading(can_replay=can_replay or bool(replays))
    grading.take("events", *live)
    for start, answer in replays:
        grading.grades.replay_asked(start)
        grading.take("replay", *answer)
    return grading.grades


def failures(graded: Conformance) -> dict[str, Finding]:
    return {finding.point.name: finding for finding in graded.findings() if finding.state == "fail"}


def test_a_clean_stream_passes_on_every_point_and_nothing_is_passed_that_was_not_seen() -> None:
    assert {finding.state for finding in grade([]).findings()} == {"not seen"}
    graded = grade(clean(), (0, [*replies(clean()), END]), (4, [*replies(clean(), 4), END]), (7, [END]))
    assert {finding.point.name: finding.state for finding in graded.findings()} == {
        point.name: "pass" for point in POINTS
    }
    assert graded.notes == []


def test_a_copy_that_replicas_share_is_not_the_replicas_own() -> None:
    own, shared = (stored(1, medium="STORAGE", locality=locality) for locality in ("LOCAL", "REMOTE"))
    begun = message(0, AllBlocksCleared(), own, shared)
    gone = [BlockRemoved([1], "STORAGE", None, locality) for locality in ("REMOTE", "LOCAL")]
    assert not failures(grade([begun, message(1, *gone)]))
    found = failures(grade([begun, message(1, gone[0]), message(2, gone[0])]))
    assert "block 1 is removed from STORAGE (remote), where it was not" in str(found["removals matched"].example)


LIVE_VIOLATIONS: dict[str, tuple[list[Frames], str]] = {
    "three frames": ([[b"t", (0).to_bytes(8, "big")]], "2 frames of 1, 8 bytes"),
    "sequence frame": ([[b"t", (1).to_bytes(8, "little"), b""]], "looks little-endian: 72057594037927936, or 1"),
    "one topic": ([message(0, stored(1)), message(1, stored(2), topic=b"u")], "after batch 0: topic b'u' after b't'"),
    "batches readable": ([raw(0, {"ts": 1})], "batch 0: a batch is an array"),
    "sequence in order": (
        [message(0, stored(1)), message(1, stored(2)), message(1, stored(2))],
        "1 came again after 1",
    ),
    "sequence without holes": ([message(0, stored(1)), message(3, stored(2))], "batches 1 to 2 never came"),
    "timestamps monotone": ([message(0, ts=5.0), message(1, ts=4.0)], "batch 1: 4.000000 after 5.000000"),
    "one rank": ([message(0), message(1, rank=3)], "data-parallel rank 3 after 0"),
    "known types": ([raw(0, [0.0, [{"type": "BlockPinned"}], 0])], "an event of type 'BlockPinned'"),
    "events whole": ([raw(0, [0.0, [{"type": "BlockRemoved", "block_hashes": 7}], 0])], "Expected `array`"),
    "known fields": (
        [raw(0, [0.0, [{"type": "BlockRemoved", "block_hashes": [], "shape": 1}], 0])],
        "field BlockRemoved.shape",
    ),
    "parents first": ([message(0, stored(2, parent=1))], "block 2: its parent 1 was never stored"),
    "tokens pairable": ([message(0, stored(1, token_ids=[1, 2, 3]))], "3 tokens for 1 blocks of 2"),
    "block size constant": ([message(0, stored(1), stored(2, block_size=1))], "block_size 1 after 2"),
    "extra keys per block": ([message(0, stored(1, 2, extra_keys=[None]))], "1 extra_keys for 2 blocks"),
    "one kind of hash": (
        [message(0, stored(1)), message(1, stored(b"12345678"))],
        "is of 8 bytes, those before of int",
    ),
    "same hash, same content": (
        [message(0, stored(1)), message(1, stored(1, token_ids=[8, 8]))],
        "batch 1: hash 1 was announced before with other tokens",
    ),
    "same content, same hash": (
        [message(0, stored(1)), message(1, stored(2, token_ids=[1, 0]))],
        "batch 1: hashes 1 and 2 stand for the same prefix",
    ),
    "removals matched": (
        [message(0, stored(1), removed(1), removed(1))],
        "block 1 is removed from GPU, where it was not",
    ),
}
# A store whose tokens cannot be paired, or with another block size, fails on both counts.
ALSO = {"block size constant": {"tokens pairable"}}


@pytest.mark.parametrize("name", LIVE_VIOLATIONS)
def test_a_violation_in_a_live_stream_is_named(name: str) -> None:
    messages, example = LIVE_VIOLATIONS[name]
    found = failures(grade(messages))
    assert found.keys() - ALSO.get(name, set()) == {name}
    assert example in str(found[name].example)
    assert found[name].point.consequence


STREAM = [message(seq, stored(seq + 10)) for seq in range(6)]
REPLAY_VIOLATIONS: dict[str, tuple[int, list[Frames], str]] = {
    "replay layout": (0, [*replies(STREAM), END[1:]], "3 frames, and 4 in those before"),
    "replay in order": (0, [*replies(STREAM)[:2], *replies(STREAM)[3:], END], "batch 3 after 1"),
    "replay honours start": (3, [*replies(STREAM), END], "asked for 3: the first reply is 0"),
    "replay equals live": (0, [*replies([message(0, stored(77))]), *replies(STREAM, 1), END], "batch 0: other bytes"),
}


@pytest.mark.parametrize("name", REPLAY_VIOLATIONS)
def test_a_violation_of_a_replay_is_named(name: str) -> None:
    start, answer, example = REPLAY_VIOLATIONS[name]
    found = failures(grade(STREAM, (start, answer)))
    assert found.keys() == {name}
    assert example in str(found[name].example)


def test_every_point_has_a_planted_violation() -> None:
    planted = LIVE_VIOLATIONS.keys() | REPLAY_VIOLATIONS.keys() | {"replay ends"}
    assert planted == {point.name for point in POINTS}


def test_a_replay_without_end_marker_is_named() -> None:
    graded = grade(STREAM, (0, replies(STREAM)))
    graded.replay_silent()
    found = failures(graded)
    assert found.keys() == {"replay ends"}
    assert "batch 5 was the last to come" in str(found["replay ends"].example)
    assert graded.batches == 6


@pytest.mark.parametrize(
    ("start", "answer", "example"),
    [
        (2, [END], "nothing came, though 5 had been sent"),
        (2, [*replies(STREAM, 2)[:2], END], "the last reply is 3, though 5 had been sent"),
        (2, [*replies(STREAM, 4), END], "the first reply is 4, though 2 is buffered"),
    ],
)
def test_a_replay_that_leaves_out_what_is_buffered_is_named(start: int, answer: list[Frames], example: str) -> None:
    graded = grade(STREAM, (2, [*replies(STREAM, 2), END]), (start, answer))
    assert example in str(failures(graded)["replay honours start"].example)


def test_a_hole_that_a_replay_fills_is_no_hole() -> None:
    grading = Grading()
    grading.take("events", STREAM[0])
    grading.take("replay", replies(STREAM)[0], END)
    grading.take("events", STREAM[3])
    asked = grading.grades.replaying
    grading.take("replay", *replies(STREAM[:4]), END)
    assert (asked, grading.grades.replaying) == (True, False)
    assert failures(grading.grades) == {}
    assert grading.grades.batches == 4


def test_a_hole_that_a_replay_does_not_fill_is_named_and_not_waited_for() -> None:
    graded = grade([STREAM[0], STREAM[3]], (0, [*replies([STREAM[0], STREAM[3]]), END]))
    assert graded.batches == 2
    assert failures(graded).keys() == {"sequence without holes", "replay in order"}


def test_a_late_subscriber_gets_no_unknown_parents_and_removals() -> None:
    late = [message(7, stored(2, parent=1), removed(9)), message(8, stored(3, parent=2))]
    assert failures(grade(late)) == {}


def test_a_cleared_cache_is_known_again() -> None:
    late = [message(7, stored(2, parent=1), AllBlocksCleared()), message(8, stored(3, parent=2))]
    assert failures(grade(late)).keys() == {"parents first"}


def test_a_restart_is_noted_and_starts_over() -> None:
    again = [message(0, stored(5, token_ids=[10, 0])), message(1, stored(6, parent=5))]
    graded = grade([*STREAM, *again])
    assert failures(graded) == {}
    assert graded.notes == ["a restart: the sequence went back from 5 to 0 with other content"]


def test_batches_out_of_order_are_no_restart() -> None:
    graded = grade([STREAM[0], STREAM[2], STREAM[1]])
    assert failures(graded).keys() == {"sequence in order", "sequence without holes"}
    assert graded.notes == []


def test_groups_that_keep_part_of_a_prefix_are_not_graded_on_tokens_and_parents() -> None:
    window = stored(2, parent=1, token_ids=[1, 2, 3], group_idx=1, kv_cache_spec_kind="sliding_window")
    assert failures(grade([message(0, window)])) == {}


def test_a_salt_that_is_told_is_other_content() -> None:
    told = [message(0, stored(1), stored(2, token_ids=[1, 0], extra_keys=[["salt"]]))]
    assert failures(grade(told)) == {}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def captured(file: Path) -> Conformance:
    grading, dealer = Grading(), False
    for record in lines_of(file):
        frames = [bytes.fromhex(frame) for frame in record.get("frames", ())]
        if record["kind"] == "live":
            grading.take("events", frames)
        elif record["kind"] == "replay_request":
            dealer = record["socket"] == "DEALER" and len(frames) == 2  # the others are not to be answered in full
            if dealer:
                grading.grades.replay_asked(int.from_bytes(frames[1], "big"))
        elif record["kind"] == "replay_reply" and dealer:
            grading.take("replay", frames)
    return grading.grades


@pytest.mark.parametrize("file", sorted(VECTORS.glob("live_capture*.jsonl")), ids=lambda file: file.stem)
def test_real_captures_pass(file: Path) -> None:
    graded = captured(file)
    assert failures(graded) == {}
    passed = {finding.point.name for finding in graded.findings() if finding.state == "pass"}
    # No capture has images or salts, and none stores a block a second time.
    assert {point.name for point in POINTS} - passed == {
        "extra keys per block",
        "same hash, same content",
        "same content, same hash",
    }
    old = "replies have no topic frame, as before vLLM 0.26"
    assert graded.notes == ([old] if "legacy" in file.name else [])


@pytest.mark.parametrize("file", sorted(VECTORS.glob("blockpool/*.jsonl")), ids=lambda file: file.stem)
def test_the_events_of_real_block_pools_pass(file: Path) -> None:
    payloads = [bytes.fromhex(record["payload_hex"]) for record in lines_of(file) if record.get("payload_hex")]
    graded = grade([[b"", seq.to_bytes(8, "big"), payload] for seq, payload in enumerate(payloads)])
    assert payloads
    assert failures(graded) == {}


def test_an_engine_that_hides_its_salts_is_found_out() -> None:
    """vLLM before 0.17 salted its hashes without saying so: the same tokens, two hashes."""
    plain = stored(1, extra_keys=None)
    salted = stored(2, token_ids=list(plain.token_ids), extra_keys=None)
    found = failures(grade([message(0, plain, salted)]))
    assert found.keys() == {"same content, same hash"}
    assert "matches falsely" in found["same content, same hash"].point.consequence


def _corrupt(change: Callable[[Frames], Frames]) -> list[Frames]:
    return [STREAM[0], change(STREAM[1])]


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_sequence_frame_of_another_length_is_named(size: int) -> None:
    found = failures(grade(_corrupt(lambda frames: [frames[0], b"\1" * size, frames[2]])))
    assert f"has {size} bytes, not 8" in str(found["sequence frame"].example)


def test_a_replay_that_a_restart_explains_is_no_violation() -> None:
    """Between the restart and its first live batch, replies are those of the new publisher."""
    grading = Grading()
    grading.take("events", *STREAM)
    for start, answer in ((5, [END]), (0, [*replies([message(0, stored(77))]), END])):
        grading.grades.replay_asked(start)
        grading.take("replay", *answer)
    grading.take("events", message(0, stored(77)))
    assert failures(grading.grades) == {}
    assert len(grading.grades.notes) == 1
