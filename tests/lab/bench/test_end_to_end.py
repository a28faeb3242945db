"""The load generator against whole replicas and routers: their own counters say the same."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.events.processes import DEADLINE_S, wait_until
from tests.replica.serving import Replica

pytestmark = pytest.mark.chaos

SPEED = ("--set=simulated_decode_tokens_per_s=2000", "--set=simulated_prefill_tokens_per_s=200000")
ALIKE = ("--num-blocks", "20000", "--set=simulated_step_overhead=0", *SPEED)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Fleet, RouterProcess]]:
    with ExitStack() as stack:
        replicas = stack.enter_context(fleet(2, *ALIKE))
        yield replicas, stack.enter_context(router(*replicas.as_options, "--log-level", "warning"))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fleet", "bench", *map(str, arguments)]


def bench(*arguments: object) -> Any:
    finished = subprocess.run(
        command(*arguments, "--json"), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def counter(replica: Replica, name: str) -> int:
    found = re.search(
        rf"^{re.escape(name)}_total(?:{{[^}}]*}})? ([\d.e+]+)$", replica.get("/metrics").body.decode(), re.M
    )
    assert found is not None, name
    return int(float(found[1]))


def counters(replicas: Fleet) -> tuple[int, int]:
    """Tokens looked up and found, in whole blocks and in parts of blocks."""
    names = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "warmroute:partial_hit_tokens")
    queries, hits, parts = (sum(counter(replica, name) for replica in replicas.replicas) for name in names)
    return queries, hits + parts


def test_tokens_and_hits_are_those_that_the_replicas_counted(running: tuple[Fleet, RouterProcess]) -> None:
    replicas, front = running
    before = counters(replicas)
    found = bench(front.url, "--workload", "chatbot", "--requests", 60, "--concurrency", 4, "--seed", 1)
    [one] = found["endpoints"]
    figures, probe = one["figures"], one["probe"]
    assert (figures["requests"], figures["failed"]) == (60, 0)
    told = (
        before[0] + probe["prompt_tokens"] + figures["input_tokens"],
        before[1] + probe["cached_tokens"] + figures["cached_tokens"],
    )
    wait_until(lambda: counters(replicas) == told, f"the replicas, which report now and then, count {told}")
    assert figures["hit_rate"] > 0.85
    assert sum(each["requests"] for each in figures["replicas"].values()) == 60
    assert figures["replicas"].keys() <= {"r0", "r1"}


def test_a_trace_is_replayed_at_its_times_with_its_blocks(running: tuple[Fleet, RouterProcess], tmp_path: Path) -> None:
    lines = [
        {"timestamp": 100 * n, "input_length": 544, "output_length": 4, "hash_ids": [*range(32), 1000 + n, 2000 + n]}
        for n in range(8)
    ]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    how = ("--trace", trace, "--speed", 2, "--api", "completions", "--seed", 5)
    figures = bench(running[0][0].url, *how)["endpoints"][0]["figures"]
    assert figures["asked_tokens"] == 8 * 544 and figures["input_tokens"] == pytest.approx(8 * 544, rel=0.01)
    assert figures["cached_tokens"] >= 7 * 512
    assert figures["cached_tokens"] < 7 * 512 + 8 * 16
    assert figures["span_s"] > 7 / 20


def test_a_frozen_engine_is_seen_in_open_loop_by_all_that_came_meanwhile(running: tuple[Fleet, RouterProcess]) -> None:
    replica = running[0][1]
    how = ("--workload", "random", "--max-tokens", "2", "--rate", "50", "--requests", "60")
    process = subprocess.Popen(command(replica.url, *how, "--json"), stdout=subprocess.PIPE, text=True)
    try:
        before = counter(replica, "vllm:prefix_cache_queries")
        wait_until(lambda: counter(replica, "vllm:prefix_cache_queries") > before + 3000, "some were answered")
        replica.signal(signal.SIGSTOP, engine=True)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.6)  # it stands still this long
        replica.signal(signal.SIGCONT, engine=True)
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        replica.signal(signal.SIGCONT, engine=True)
        process.kill()
        process.wait()
    figures = json.loads(out)["endpoints"][0]["figures"]
    assert figures["failed"] == 0
    assert figures["ttft_s"]["max"] > 0.5
    assert figures["ttft_s"]["p90"] > 0.2  # of 60, at least 25 came while it stood


def test_ctrl_c_shows_what_there_is_and_leaves_nothing(running: tuple[Fleet, RouterProcess]) -> None:
    replicas, front = running
    before = counters(replicas)[0]
    how = ("--rate", "20", "--for", "60", "--max-tokens", "1500")
    process = subprocess.Popen(
        command(front.url, *how, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: counters(replicas)[0] > before + 5_000, "many were sent")
        for replica in replicas.replicas:
            replica.signal(signal.SIGSTOP, engine=True)  # the next ones stay unfinished
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.6)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        for replica in replicas.replicas:
            replica.signal(signal.SIGCONT, engine=True)
        process.kill()
        process.wait()
    assert (process.returncode, err) == (130, "")
    found = json.loads(out)
    assert found["interrupted"]
    assert found["endpoints"][0]["unfinished"] > 0
    for replica in replicas.replicas:
        replica.wait_idle()  # nobody waits for the answers, and the replicas know


def test_what_a_router_has_logged_can_be_asked_again(running: tuple[Fleet, RouterProcess], tmp_path: Path) -> None:
    replicas, _ = running
    log = tmp_path / "log.jsonl"
    with router(*replicas.as_options, "--log-level", "warning", "--request-log", log) as front:
        bench(front.url, "--requests", 20, "--rate", 40, "--max-tokens", 2)
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(logged) == 22  # with two probes
    how = ("--trace", log, "--api", "completions", "--seed", 9)
    figures = bench(replicas[0].url, *how)["endpoints"][0]["figures"]
    assert (figures["requests"], figures["failed"]) == (22, 0)
    assert figures["input_tokens"] == pytest.approx(sum(line["prompt_tokens"] for line in logged), rel=0.02)
    assert figures["hit_rate"] > 0.8  # the system prompt is shared again
