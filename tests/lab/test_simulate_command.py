"""`warmroute simulate`, as users run it."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from api.process.lifeline import module
from lab.commands.simulate import simulate
from lab.trace.requests import Trace
from tests.events.processes import wait_until
from tests.lab.traffic import agents, conversations, named
from tests.processes import family, is_alive


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("traces") / "chats.jsonl", conversations(150))


def written(path: Path, trace: Trace) -> Path:
    with path.open("w") as file:
        for one in trace.requests:
            fields = {"timestamp": one.at_s * 1000, "input_length": one.input_tokens, "session": one.session}
            file.write(json.dumps({**fields, "output_length": one.output_tokens, "hash_ids": one.blocks}) + "\n")
    return path


def run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(simulate, ["--trace", str(path), *arguments])


def answer(path: Path, *arguments: str) -> dict[str, Any]:
    result = run(path, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_table_has_a_line_for_every_policy_and_both_bounds(path: Path) -> None:
    result = run(path, "--replicas", "2", "--load", "0.9")
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.stdout.splitlines()[4:] if line]
    assert names == ["round-robin", "least-loaded", "prefix", "cost", "pooled", "ideal"]
    assert "150 requests" in result.stdout and "load 0.90" in result.stdout


def test_a_closed_loop_shows_how_long_sessions_take_and_needs_some(path: Path, tmp_path: Path) -> None:
    talks = written(tmp_path / "agents.jsonl", named(agents(50)))
    result = run(talks, "--closed-loop", "--policy", "cost")
    assert result.exit_code == 0, result.output
    assert " session " in result.stdout and "pooled" in result.stdout and "ideal" not in result.stdout
    found = answer(talks, "--closed-loop", "--policy", "cost")["policies"]["cost"]
    assert 0 < found["session_mean_s"] <= found["session_p99_s"]
    refused = run(path, "--closed-loop")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"--closed-loop needs sessions, and no request of {path} names one; leave it out" in refused.stderr


def test_the_arena_has_a_line_for_every_policy_and_the_pooled_bound(path: Path) -> None:
    some = ("--replicas", "2", "--load", "0.9", "--policy", "sglang")
    result = run(path, *some, "--arena")
    assert result.exit_code == 0, result.output
    head, *rows = [line.split() for line in result.stdout.splitlines()[3:]]
    assert head == ["policy", "hits", "TTFT", "mean", "p99", "closed", "at", "least", "ahead"]
    assert [row[0] for row in rows] == ["round-robin", "cost", "cost-in-order", "sglang", "pooled"]
    assert [row[-2:] for row in (rows[0], rows[-1])] == [["of", "1"], ["100.0%", "100.0%"]]
    alone = answer(path, *some, "--no-bounds")["policies"]["sglang"]
    assert rows[3][1:3] == [f"{alone['hit_rate']:.1%}", f"{alone['ttft_mean_s']:.2f}"]


def test_an_interrupted_arena_leaves_no_process_behind(path: Path) -> None:
    """Ctrl-C signals the whole group."""
    command = module("fleet", "simulate", "--arena", "--trace", str(path), "--seeds", "1000", "--jitter", "1")
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: len(family(process.pid)) > 2, "it has workers", 30.0)
        started = family(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30.0) != 0
    wait_until(lambda: not any(map(is_alive, started)), "all have ended", 30.0)


def test_json_says_what_was_simulated_and_every_run(path: Path) -> None:
    found = answer(path, "--policy", "cost", "--seeds", "2", "--jitter", "0.3", "--no-bounds", "--replicas", "3")
    assert found["trace"]["block_tokens"] == 512
    assert found["settings"]["replicas"] == 3
    assert found["bounds"] == {}
    runs = found["policies"]["cost"]["runs"]
    assert found["policies"]["cost"]["hit_rate"] == pytest.approx(sum(one["hit_rate"] for one in runs) / 2)


def test_a_faster_pace_means_more_load_and_longer_queues(path: Path) -> None:
    slow, fast = (
        answer(path, "--policy", "round-robin", "--no-bounds", "--speed", speed)["policies"]["round-robin"]
        for speed in ("0.1", "10")
    )
    assert slow["ttft_mean_s"] < fast["ttft_mean_s"]
    assert slow["utilization"] < fast["utilization"]


def test_runs_that_take_no_time_have_no_spread(tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}] * 2
    alike = tmp_path / "alike.jsonl"
    alike.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run(alike, "--prefill-rate", "1e9", "--seeds", "2", "--policy", "cost")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "cost,fastest"], "'fastest' is not one of"),
        (["--load", "1", "--speed", "2"], "--speed does not work with --load"),
        (["--capacity-tokens", "1000"], "holds|has 1 blocks of 512"),
        (["--load", "0"], "0"),
        (["--arena", "--no-bounds"], "--arena does not work with --no-bounds|--no-bounds does not work with --arena"),
        (["--block-tokens", "64"], "blocks of 64"),
        (["--no-events", "--no-optimistic"], "--no-optimistic does not work with --no-events"),
        (["--prefill-rate", "1e-320"], "prefill-rate"),
        (["--jitter", "1e308"], "jitter"),
    ],
)
def test_values_that_cannot_be_used_are_refused_with_status_2(path: Path, arguments: list[str], complaint: str) -> None:
    result = run(path, *arguments)
    assert result.exit_code == 2, result.output
    assert any(words in result.output for words in complaint.split("|")), result.output


def test_without_a_trace_it_says_what_to_give() -> None:
    result = CliRunner().invoke(simulate, [])
    assert result.exit_code == 2
    assert "--trace" in result.output
