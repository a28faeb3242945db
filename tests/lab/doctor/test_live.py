"""Real routers in front of real replicas, with faults planted in some of them, under traffic."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from lab.doctor.asking import Asking, watched
from lab.doctor.comparing import figures_of
from router.dashboard.doctor.figures import Figures
from router.dashboard.doctor.rules import Finding, findings
from tests.chaos.replicas import Command, command
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import wait_until

pytestmark = pytest.mark.chaos

FAST = (
    "--set=simulated_prefill_tokens_per_s=1e6",
    "--set=simulated_decode_tokens_per_s=2000",
    *("--set=simulated_step_overhead=0", "--log-level", "warning"),
)
LOOK_S = 1.2
PROMPT = 480  # tokens: thirty blocks
FAULTY: dict[str, tuple[str, ...]] = {
    "tiny": ("--num-blocks", "64", "--max-model-len", "512"),
    "off": ("--no-enable-prefix-caching",),
    "mute": ("--no-events",),
}


class Fleet:
    """Two routers: one with healthy replicas, and one with a replica for each fault."""

    def __init__(self, stack: ExitStack) -> None:
        options = {"w0": (), "w1": (), **FAULTY}
        replicas = {name: stack.enter_context(_replica(name, *more)) for name, more in options.items()}
        for one in replicas.values():
            one.wait_ready()
        self.well = stack.enter_context(_router(replicas, "w0", "w1"))
        self.faulty = stack.enter_context(_router(replicas, *FAULTY))


def _replica(name: str, *options: str) -> Any:
    model = "demo" if name.startswith("w") else name
    return command(*FAST, *options, "--served-model-name", model, "--replica-name", name, ready=False)


def _router(replicas: dict[str, Command], *names: str) -> Any:
    specs = [text for name in names for text in ("--replica", f"url={replicas[name].url},name={name}")]
    return router(*specs, "--set=slow_start=0", "--log-level", "error")


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack)


@contextmanager
def traffic(at: RouterProcess, *bodies: Callable[[int], dict[str, Any]], warm_up: int = 24) -> Iterator[None]:
    """One client for each, that asks again and again; begins to count when each has asked often enough."""
    over, asked = threading.Event(), [0] * len(bodies)

    def client(number: int) -> None:
        while not over.wait(0.005):
            answer = at.post("/v1/completions", {"max_tokens": 1} | bodies[number](asked[number]))
            assert answer.status == 200, answer.body
            asked[number] += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(len(bodies))]
    for one in clients:
        one.start()
    try:
        wait_until(lambda: min(asked) >= warm_up, "the caches are as they will be")
        yield
    finally:
        over.set()
        for one in clients:
            one.join()


def of(model: str, count: int, first: int = 0) -> Callable[[int], dict[str, Any]]:
    """So many prompts, by turns."""
    return lambda turn: {"model": model, "prompt": f"{first + turn % count:04} ".ljust(PROMPT, "x")}


def looked(url: str, for_s: float = LOOK_S, replicas: tuple[str, ...] = ()) -> tuple[Figures, list[Finding]]:
    with Asking(url or None, replicas) as asking:
        figures = figures_of(*watched(asking, for_s, lambda _: None))
    return figures, findings(figures)


def doctor(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fleet", "doctor", "--for", "0.5", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_healthy_replicas_have_no_findings(running: Fleet) -> None:
    with traffic(running.well, *(of("demo", 8, first) for first in (0, 10, 20))):
        figures, found = looked(running.well.url)
        told = doctor("--router", running.well.url)
    assert [one for one in found if one.rule != "starved-of-cpu"] == []  # it may be true of this machine
    assert all(one.own is not None and one.routed is not None for one in figures.replicas)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("nothing wrong: 2 replicas, ")
    assert told.stdout.count("\n") == 1


def test_each_fault_is_named_at_the_replica_that_has_it(running: Fleet) -> None:
    bodies = (of("tiny", 20), of("off", 8), of("mute", 8))
    with traffic(running.faulty, *bodies):
        _, found = looked(running.faulty.url)
    assert {(one.rule, one.replica) for one in found} == {
        ("thrashing", "tiny"),
        ("caching-off", "off"),
        ("no-events", "mute"),
    }


def test_a_drained_replica_is_named_and_the_command_says_so(running: Fleet) -> None:
    running.well.post("/replicas/w1/drain")
    try:
        told = doctor("--router", running.well.url)
        answer = json.loads(doctor("--router", running.well.url, "--json").stdout)
    finally:
        running.well.post("/replicas/w1/undrain")
    assert told.returncode == 1
    assert "replica-draining  w1" in told.stdout
    assert "see docs/troubleshooting.md#replica-draining" in told.stdout
    assert [(one["rule"], one["replica"]) for one in answer["findings"]] == [("replica-draining", "w1")]
    assert len(answer["figures"]["replicas"]) == 2


def test_a_replica_without_a_router_is_looked_at_alone(running: Fleet) -> None:
    [url] = [one["url"] for one in running.faulty.get("/replicas").json["replicas"] if one["name"] == "mute"]
    figures, found = looked("", 0.5, (url,))
    assert figures.router is None
    assert [one.rule for one in found] == ["no-events"]
