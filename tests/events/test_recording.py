"""Recordings: records are read back, even from damaged files, and produce the same view."""

import os
import random
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.recording import MAGIC, MARK, BadRecording, Recorder, Recording, feed_record
from events.source import Record, Source
from events.view import CacheView
from tests.events.recorded import SOURCE, TOPIC, Engine, Line, replay_into_view
from tests.events.resident import copies

RECORDS = [Record(100.0 + n, 0, "events", [TOPIC, n.to_bytes(8, "big"), bytes([n]) * n]) for n in range(20)]

records = st.builds(
    Record,
    time=st.floats(0, 2e9),
    source=st.integers(0, 3),
    kind=st.sampled_from(["events", "replay", "status", "snapshot", "connected", "tick"]),
    frames=st.lists(st.binary(max_size=200), max_size=4),
)


def write(path: Path, written: list[Record], **options: Any) -> None:
    with Recorder(path, [SOURCE], **options) as recorder:
        for record in written:
            recorder.write(record)


def offsets(path: Path) -> list[int]:
    """Offset of each record, and the end of the file."""
    starts = [match.start() for match in re.finditer(re.escape(MARK), path.read_bytes())]
    return [*starts[1:], path.stat().st_size]


@given(st.lists(records, max_size=30))
def test_what_is_written_is_read(written: list[Record]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.wre"
        write(path, written)
        recording = Recording(path)
        assert list(recording.records()) == written
        assert recording.damage == []


def test_the_header_describes_the_sources(tmp_path: Path) -> None:
    sources = [SOURCE, Source("b", "ipc:///b", status="ipc:///s", snapshot="ipc:///n", topic="t", model="n")]
    with Recorder(tmp_path / "a.wre", sources):
        pass
    header = Recording(tmp_path / "a.wre").header
    assert header.sources == sources
    assert header.tool.startswith("warmroute")
    assert header.created > 0


@pytest.mark.parametrize("umask", [0, 0o22, 0o77])
def test_only_the_owner_can_read_it(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "a.wre", RECORDS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.wre").stat().st_mode) == 0o600


def test_an_existing_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.wre"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"a\.wre exists; --force"):
        Recorder(path, [SOURCE])
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 something else", MAGIC, MAGIC + b"\xa5\x5aWR\xff\xff\xff\xff"])
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.wre").write_bytes(content)
    with pytest.raises(BadRecording, match=r"a\.wre"):
        Recording(tmp_path / "a.wre")


def test_every_cut_of_the_tail_leaves_the_rest_and_is_reported(tmp_path: Path) -> None:
    path, cut = tmp_path / "a.wre", tmp_path / "cut.wre"
    write(path, RECORDS)
    content, starts = path.read_bytes(), offsets(path)
    for end in range(starts[-4], len(content)):
        cut.write_bytes(content[:end])
        whole = sum(start <= end for start in starts[1:])
        recording = Recording(cut)
        assert list(recording.records()) == RECORDS[:whole]
        damage = [(one.offset, one.length) for one in recording.damage]
        assert damage == ([(starts[whole], end - starts[whole])] if end > starts[whole] else [])


def test_every_flipped_bit_costs_only_its_record_and_is_reported(tmp_path: Path) -> None:
    path, flipped = tmp_path / "a.wre", tmp_path / "flipped.wre"
    write(path, RECORDS)
    content, starts = path.read_bytes(), offsets(path)
    for position in range(starts[7], starts[9]):
        for bit in (0, 3, 7):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            flipped.write_bytes(changed)
            hit = 7 if position < starts[8] else 8
            recording = Recording(flipped)
            assert list(recording.records()) == RECORDS[:hit] + RECORDS[hit + 1 :]
            [damage] = recording.damage
            assert (damage.offset, damage.length) == (starts[hit], starts[hit + 1] - starts[hit])
            assert "skipped" in str(damage)


def test_noise_in_the_middle_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.wre"
    write(path, RECORDS)
    content, starts = path.read_bytes(), offsets(path)
    noise = random.Random(1).randbytes(5000)
    path.write_bytes(content[: starts[3]] + noise + content[starts[5] :])
    recording = Recording(path)
    assert list(recording.records()) == RECORDS[:3] + RECORDS[5:]
    assert [(damage.offset, damage.length) for damage in recording.damage] == [(starts[3], 5000)]


def test_a_whole_frame_that_is_no_record_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.wre"
    with Recorder(path, [SOURCE]) as recorder:
        recorder.write(RECORDS[0])
        recorder._append({"of": "the future"})  # type: ignore[arg-type]
        recorder.write(RECORDS[1])
    recording = Recording(path)
    assert list(recording.records()) == RECORDS[:2]
    assert len(recording.damage) == 1


def test_what_was_written_a_second_ago_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 50.0
    monkeypatch.setattr("events.recording.time.monotonic", lambda: now_s)
    recorder = Recorder(tmp_path / "a.wre", [SOURCE])
    recorder.write(RECORDS[0])
    assert list(Recording(tmp_path / "a.wre").records()) == []
    now_s += 1.0
    recorder.flush_if_due()
    assert list(Recording(tmp_path / "a.wre").records()) == [RECORDS[0]]
    recorder.close()


def test_a_kind_of_a_later_version_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.wre", [RECORDS[0], Record(101.0, 0, "telemetry", [b"x"]), Record(101.0, 7, "events", [])])
    assert replay_into_view(Recording(tmp_path / "a.wre"), SOURCE).stream.last_seq == 0


def test_a_tap_records_times_that_never_run_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(tmp_path / "a.wre", [SOURCE]) as recorder:
        tap = recorder.tap(0)
        tap("connected", [])
        monkeypatch.setattr("events.recording.time.time", lambda: 0.0)
        tap("events", RECORDS[0].frames)
    first, second = Recording(tmp_path / "a.wre").records()
    assert first.kind == "connected"
    assert second.time >= first.time > 1e9


# ---- the view


def summary(view: CacheView) -> Any:
    return copies(view.resolver), view.resolver.keys(), msgspec.to_builtins(view.stream.stats), view.inexact


@pytest.mark.parametrize("seed", range(5))
def test_a_replayed_view_is_the_recorders_own_at_every_moment(tmp_path: Path, seed: int) -> None:
    engine, chance = Engine(seed), random.Random(seed)
    truth: list[Any] = []
    with Recorder(tmp_path / "a.wre", [SOURCE]) as recorder:
        line = Line(recorder)
        line.keep_replays = lambda _: chance.random() < 0.97
        line.on_record = lambda record: truth.append((record, summary(line.view)))
        line.arrive("connected", [])
        for step in range(120):
            if step in (50, 90):
                line.restart()
                engine.chains = []
            line.publish(engine.step(), lost=chance.random() < 0.2)
            if chance.random() < 0.1:
                line.wait(chance.random() * 3)
        line.wait(1)
        end = summary(line.view)
        assert line.view.stream.stats.lost_batches > 0
    recording = Recording(tmp_path / "a.wre")
    view = recording.sources[0].view()
    seen: list[Any] = []
    for record in recording.records():
        feed_record(view, record)
        if record.kind not in ("tick", "disconnected"):
            seen.append((record, summary(view)))
    assert seen == truth
    assert summary(replay_into_view(recording, SOURCE)) == end


def test_a_view_at_a_batch_and_at_a_time(tmp_path: Path) -> None:
    engine = Engine(3)
    sizes = []
    with Recorder(tmp_path / "a.wre", [SOURCE]) as recorder:
        line = Line(recorder)
        line.arrive("connected", [])
        for _ in range(20):
            line.publish(engine.step())
            sizes.append((line.now_s, line.view.resolver.resident_blocks()))
    recording = Recording(tmp_path / "a.wre")
    for seq, (now_s, blocks) in enumerate(sizes):
        assert replay_into_view(recording, SOURCE, until_seq=seq).resolver.resident_blocks() == blocks
        assert replay_into_view(recording, SOURCE, until_time=now_s).resolver.resident_blocks() == blocks
