"""`record`, as a process on real sockets: the file has everything received, even after a kill."""

import signal
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from events.cli import events
from events.recording import BadRecording, Recording
from events.sockets.curve import load_curve, write_keys
from tests.events.processes import tool, wait_until
from tests.events.recorded import record_incident, replay_into_view
from tests.events.replicas import Replica, replica
from tests.events.resident import copies


def last_seq(path: Path) -> int:
    """The last batch that is in the file by now."""
    try:
        recording = Recording(path)
    except (BadRecording, FileNotFoundError):
        return -1
    return replay_into_view(recording, recording.sources[0]).stream.last_seq


def record(path: Path, engine: Replica, *options: str) -> list[object]:
    return ["record", engine.events, "--replay", engine.replay, "--model", "m", "-o", path, *options]


def wait_for_batch(path: Path, seq: int) -> None:
    wait_until(lambda: last_seq(path) >= seq, f"batch {seq} is in {path.name}")


def truth(engine: Replica) -> object:
    """The engine's cache, read again."""
    return {block_hash for chain in engine.engine.chains for block_hash in chain}


def test_the_file_holds_the_stream(tmp_path: Path) -> None:
    path = tmp_path / "a.wre"
    with replica(native=False) as engine, tool(*record(path, engine)) as recorder:
        engine.step(10)
        wait_for_batch(path, 9)
        assert recorder.end(signal.SIGTERM) == 0
        [summary] = recorder.lines()
    assert (summary["batches"], summary["gaps"], summary["bytes"]) == (10, 0, path.stat().st_size)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    recording = Recording(path)
    view = replay_into_view(recording, recording.sources[0])
    assert view.inexact is None
    assert set(copies(view.resolver)["GPU", 0]) == truth(engine)
    assert recording.damage == []


def test_an_encrypted_stream_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "a.wre"
    (tmp_path / "clients").mkdir()
    public, secret = write_keys(str(tmp_path / "server"))
    _, own = write_keys(str(tmp_path / "clients" / "own"))
    curve = load_curve(str(secret), str(tmp_path / "clients"))
    keys = ("--curve-server", str(public), "--curve-secret", str(own))
    with replica(native=False, curve=curve) as engine, tool(*record(path, engine, *keys)) as recorder:
        engine.step(3)
        wait_for_batch(path, 2)
        assert recorder.end(signal.SIGINT) == 0
    assert own.read_bytes() not in path.read_bytes()


@pytest.mark.chaos
def test_what_was_recorded_before_a_kill_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.wre"
    with replica(native=False) as engine, tool(*record(path, engine)) as recorder:
        engine.step(10)
        wait_for_batch(path, 9)
        assert recorder.end(signal.SIGKILL) == -signal.SIGKILL
    recording = Recording(path)
    view = replay_into_view(recording, recording.sources[0])
    assert set(copies(view.resolver)["GPU", 0]) == truth(engine)


def test_a_native_replica_is_recorded_with_status_and_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "a.wre"
    with replica() as engine:
        ends = engine.publisher.endpoints
        options = ["--status", str(ends.status), "--snapshot", str(ends.snapshot), "--for", "0.5"]
        with tool(*record(path, engine, *options)) as recorder:
            assert recorder.end(None) == 0
    kinds = {record.kind for record in Recording(path).records()}
    assert "snapshot" in kinds


def test_two_streams_are_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.wre"
    with (
        replica(native=False) as a,
        replica(native=False) as b,
        tool("record", a.events, b.events, "--replay", a.replay, "--replay", b.replay, "-o", path) as recorder,
    ):
        a.step(4)
        b.step(6)
        wait_until(lambda: path.exists() and _seqs(path) == [3, 5], "both streams are in the file")
        assert recorder.end() == 0


def _seqs(path: Path) -> list[int]:
    try:
        recording = Recording(path)
    except BadRecording:
        return []
    return [replay_into_view(recording, source).stream.last_seq for source in recording.sources]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(events, ["record", *map(str, arguments), "--json"])


def test_a_recording_is_not_recorded_again(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    result = run(tmp_path / "a.wre", "tcp://127.0.0.1:1", "-o", tmp_path / "r.wre")
    assert result.exit_code == 2
    assert "a.wre is a recording already" in result.stderr
    assert not (tmp_path / "r.wre").exists()
