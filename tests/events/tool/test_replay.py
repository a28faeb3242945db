"""`replay` and `keygen`, as users run them."""

import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from events.cli import events
from events.recording.recording import Recording
from events.sockets.curve import load_curve, load_curve_client
from tests.events.processes import FREE, Tool, replica, tool, wait_until
from tests.events.recorded import SOURCE, record_incident, replay_into_view


def bound(replay: Tool) -> list[str]:
    """The endpoints that a running `replay` has said."""
    wait_until(lambda: replay.err or replay.process.poll() is not None, "it prints its endpoints")
    assert replay.err[0].startswith("publishing at ")
    return replay.err[0].removeprefix("publishing at ").strip().split(", ")


def seen_after_reset(lines: list[dict[str, Any]], seq: int) -> bool:
    """Return True if the batch of this number was shown in the second life."""
    kinds = [line["type"] for line in lines]
    return "reset" in kinds and any(line.get("seq") == seq for line in lines[kinds.index("reset") :])


def test_a_recording_can_be_followed_by_the_other_tools(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    truth = replay_into_view(Recording(tmp_path / "a.wre"), SOURCE)
    options = ["--bind", FREE, "--replay-bind", FREE, "--speed", "max", "--stay", "30"]
    with tool("replay", tmp_path / "a.wre", *options) as replay:
        at, replays = bound(replay)
        with tool("tail", at, "--replay", replays, "--model", "m") as tail:
            last = truth.stream.last_seq
            tail.wait_for(lambda lines: seen_after_reset(lines, last), "the last batch")
            assert tail.end() == 0
        assert replay.end() == 0
    summary = tail.lines()[-1]
    assert (summary["inexact"], summary["resident_blocks"]) == (None, truth.resolver.resident_blocks())
    [published] = replay.lines()
    assert published["batches"] == sum(r.kind == "events" for r in Recording(tmp_path / "a.wre").records())
    assert published["replays"] > 0


def test_it_waits_for_a_subscriber_until_it_is_ended(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    with tool("replay", tmp_path / "a.wre", "--bind", FREE) as replay:
        bound(replay)
        wait_until(lambda: len(replay.err) == 2, "it says that it waits")
        assert replay.end(signal.SIGTERM) == 0
        assert replay.lines() == [{"finished": False, "batches": 0, "payload_bytes": 0, "replays": 0, "snapshots": 0}]


def test_it_ends_at_the_end(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    options = ["--bind", FREE, "--speed", "max", "--no-wait", "--stay", "0"]
    with tool("replay", tmp_path / "a.wre", *options, "--from", "20") as replay:
        assert replay.end(None) == 0
        [published] = replay.lines()
    assert published["finished"]
    assert 0 < published["batches"] < sum(r.kind == "events" for r in Recording(tmp_path / "a.wre").records())


def test_it_loops_until_it_is_ended(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre", steps=40)
    with tool("replay", tmp_path / "a.wre", "--bind", FREE, "--speed", "max", "--loop") as replay:
        with tool("tail", bound(replay)[0]) as tail:
            tail.wait_for(lambda lines: sum(line["type"] == "reset" for line in lines) > 3, "several rounds")
            assert tail.end() == 0
        assert replay.end() == 0


def run(*arguments: object) -> Result:
    return CliRunner().invoke(events, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bind", "5557"], "--bind: '5557' is not an endpoint; write tcp://HOST:PORT or ipc://PATH"),
        (
            ["--bind", FREE, "--replay-bind", "tcp://127.0.0.1:x"],
            "--replay-bind: 'x' in 'tcp://127.0.0.1:x' is not a port",
        ),
        (["--bind", FREE, "--speed", "fast"], "'fast' is neither a number above 0 nor 'max'"),
        (["--bind", FREE, "--speed", "0"], "'0' is neither a number above 0 nor 'max'"),
        (["--bind", FREE, "--from", "5000"], "--from is after the end of the recording"),
        (["--bind", FREE, "--from", "noon"], "'noon' is not a moment"),
        (["--bind", FREE, "--source", "b"], "holds a, not 'b'; choose one with --source"),
        ([], "Missing option '--bind'"),
    ],
)
def test_a_wrong_option_is_quoted(tmp_path: Path, options: list[str], message: str) -> None:
    record_incident(tmp_path / "a.wre")
    result = run("replay", tmp_path / "a.wre", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    with replica() as engine:
        result = run("replay", tmp_path / "a.wre", "--bind", engine.events)
    assert result.exit_code == 1
    assert f"cannot bind {engine.events}: Address already in use" in result.stderr


def test_a_bind_to_all_addresses_logs_a_warning(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre", steps=40)
    options = ["--bind", "tcp://*:*", "--no-wait", "--speed", "max", "--stay", "0"]
    assert "the recording holds prompts" in run("replay", tmp_path / "a.wre", *options).stderr


def test_keys_are_written_and_never_overwritten(tmp_path: Path) -> None:
    assert run("keygen", tmp_path / "me").exit_code == 0
    public, secret = tmp_path / "me.key", tmp_path / "me.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert load_curve(str(secret)).public == load_curve_client(str(public), str(secret)).server
    again = run("keygen", tmp_path / "me")
    assert again.exit_code == 1
    assert "already exists; keys are never overwritten" in again.stderr
    assert run("keygen", tmp_path / "nowhere" / "me").exit_code == 1


def test_the_recorded_source_can_be_named(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    options = ["--source", SOURCE.name, "--bind", FREE, "--no-wait", "--speed", "max", "--stay", "0"]
    assert run("replay", tmp_path / "a.wre", *options).exit_code == 0
