"""`tail`, as a process on real sockets: lines are in order, and it ends cleanly."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from events.cli import events
from events.messages import AllBlocksCleared, BlockStored, EventBatch, encode_batch
from events.publisher import Publisher, PublisherConfig
from events.recording import Recorder
from tests.events.processes import DEADLINE_S, FREE, tool
from tests.events.recorded import SOURCE, Engine, Line, record_incident, record_payloads
from tests.events.replicas import replica


def free_port() -> int:
    with Publisher(PublisherConfig(FREE, None, None, None)) as publisher:
        return int(publisher.endpoints.events.rpartition(":")[2])


def test_a_stream_is_shown_and_ends_with_a_summary() -> None:
    with (
        replica(native=False) as engine,
        tool("tail", engine.events, "--replay", engine.replay, "--model", "m") as tail,
    ):
        engine.step(5)
        tail.wait_for(lambda lines: any(line.get("seq") == 4 for line in lines), "the past is shown")
        engine.step(5)
        tail.wait_for(lambda lines: any(line.get("seq") == 9 for line in lines), "what is new is shown")
        assert tail.end(signal.SIGINT) == 0
        lines = tail.lines()
    assert lines[0]["type"] == "connected"
    shown = [line for line in lines if "seq" in line]
    assert [line["seq"] for line in shown] == list(range(10))
    assert {line["by"] for line in shown} <= {"events", "replay"}
    stored = [line for line in shown if line["type"] == "BlockStored"]
    assert stored
    assert all(len(line["key"]) == 16 and line["tokens"] == 4 * line["blocks"] for line in stored)
    assert [line["type"] for line in lines].count("exact") == 1
    summary = lines[-1]
    assert (summary["type"], summary["batches"], summary["inexact"]) == ("summary", 10, None)
    assert tail.err == []


def test_a_restart_is_shown_where_it_happens() -> None:
    port = free_port()
    ports: dict[str, Any] = {"events": f"tcp://127.0.0.1:{port}", "replay": f"tcp://127.0.0.1:{free_port()}"}
    with tool("tail", ports["events"], "--replay", ports["replay"]) as tail:
        with replica(native=False, **ports) as engine:
            engine.step(5)
            tail.wait_for(lambda lines: any(line.get("seq") == 4 for line in lines), "the first life")
        with replica(native=False, **ports) as engine:
            engine.engine.random.seed(99)
            engine.step(3)
            tail.wait_for(lambda lines: sum(line.get("seq") == 2 for line in lines) == 2, "the second life")
        assert tail.end() == 0
        kinds = [line["type"] for line in tail.lines()]
    assert kinds.count("connected") == 2
    assert kinds.count("reset") == 1
    assert tail.lines()[-1]["restarts"] == 1


def test_it_ends_by_itself_after_a_time() -> None:
    with replica(native=False) as engine, tool("tail", engine.events, "--for", "0.3") as tail:
        assert tail.end(None) == 0
        assert tail.lines()[-1]["type"] == "summary"


@pytest.mark.chaos
def test_silence_is_explained(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/nobody"
    with tool("tail", endpoint, "--for", "4") as tail:
        assert tail.end(None) == 0
        assert tail.err == [f"nothing answers at {endpoint}; did you start the engine with KV events?\n"]


def test_a_closed_pipe_ends_it_quietly() -> None:
    with replica(native=False) as engine:
        command = [sys.executable, "-m", "fleet", "events", "tail", engine.events, "--replay", engine.replay]
        reader, writer = os.pipe()
        with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE) as tail:
            os.close(writer)
            engine.step(3)
            assert os.read(reader, 100)
            os.close(reader)
            engine.step(3)
            _, errors = tail.communicate(timeout=DEADLINE_S)
    assert (tail.returncode, errors) == (1, b"")


def shown(path: Path, *options: str, as_json: bool = True) -> str:
    result = CliRunner().invoke(events, ["tail", str(path), *options, *(["--json"] if as_json else [])])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_recorded_incident_shows_gaps_repairs_and_the_restart(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    output = shown(tmp_path / "a.wre")
    for kind in ('"gap","first":', '"by":"replay"', '"type":"reset"', '"type":"exact"', '"type":"summary"'):
        assert kind in output
    assert output.index('"type":"gap"') < output.index('"type":"exact"', output.index('"type":"gap"'))


def test_without_json_there_is_text_in_a_pipe_too(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.wre", [SOURCE]) as recorder:
        line, engine = Line(recorder), Engine(1)
        line.keep_replays = lambda seq: seq != 1
        line.arrive("connected", [])
        line.publish(engine.step())
        line.publish(engine.step(), lost=True)
        line.publish(engine.step())
    lines = shown(tmp_path / "a.wre", as_json=False).splitlines()
    assert any(line.split()[1:3] == ["#0", "stored"] and "after root" in line and "key " in line for line in lines)
    assert any(line.split()[1:] == ["gap", "batch", "1", "missing"] for line in lines)
    assert any(line.split()[1:] == ["partial", "batch", "1", "is", "lost"] for line in lines)
    assert lines[-1].endswith("NOT EXACT: batch 1 is lost")


def test_a_place_that_replicas_share_is_told_from_the_replicas_own(tmp_path: Path) -> None:
    event = BlockStored([1], None, [1, 2], 2, None, "STORAGE", None, locality="REMOTE", ownership="tier-1")
    record_payloads(tmp_path / "a.wre", [encode_batch(EventBatch(0.0, [event]))])
    assert '"medium":"STORAGE"' in (output := shown(tmp_path / "a.wre"))
    assert '"locality":"REMOTE","ownership":"tier-1"' in output
    assert "STORAGE (remote)" in shown(tmp_path / "a.wre", as_json=False)


def test_the_damage_of_a_file_is_noted(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    with open(tmp_path / "a.wre", "r+b") as file:
        file.truncate((tmp_path / "a.wre").stat().st_size - 1)
    result = CliRunner().invoke(events, ["tail", str(tmp_path / "a.wre")])
    assert "the end is cut off or damaged" in result.stderr


def test_several_streams_are_distinguished_and_a_cleared_cache_is_shown() -> None:
    with (
        replica(native=False) as a,
        replica(native=False) as b,
        tool("tail", a.events, b.events, "--replay", a.replay, "--replay", b.replay) as tail,
    ):
        a.publisher.publish([AllBlocksCleared()])
        b.step(1)
        tail.wait_for(lambda lines: len({line["source"] for line in lines if "seq" in line}) == 2, "both are shown")
        assert tail.end() == 0
        summaries = [line for line in tail.lines() if line["type"] == "summary"]
        assert [line["type"] for line in tail.lines()].count("AllBlocksCleared") == 1
    assert [line["source"] for line in summaries] == [e.removeprefix("tcp://") for e in (a.events, b.events)]
