"""Eight clients with the largest legal bodies, and a hundred that never finish theirs, against real processes."""

import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import uvloop

from tests.chaos.replicas import command
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import wait_until
from tests.hostile.attackers import FAST, MEGABYTE, attackers, latencies, memory, percentile, unfinished
from tests.processes import children
from tests.replica.serving import Replica

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

MOST = 500 * MEGABYTE
KEPT = 150 * MEGABYTE  # of what an idle router or replica takes, when all have gone
# The promise is 50 ms; here others use the same two cores. Without the fix: seconds.
PATIENCE_MS = 1000.0
ASKED_S = 3.0
REST = ("a million messages", "2 million logit_bias entries", "the same key again", "1 MB of nested lists")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Replica, RouterProcess]]:
    with command(*FAST) as replica, router("--replica", replica.url, "--log-level", "warning") as running:
        yield replica, running
        assert not any("Traceback" in line or " ERROR " in line for line in running.err), running.err


@pytest.mark.parametrize(
    "shape",
    [
        "15 million token ids",
        "nested lists",
        "/v1/embeddings",
        *(pytest.param(one, marks=pytest.mark.grid) for one in REST),
    ],
)
def test_eight_clients_with_large_bodies_do_no_harm(served: tuple[Replica, RouterProcess], shape: str) -> None:
    _, running = served
    told = Counter[str]()
    with attackers(running.port, shape, told):
        took_ms = percentile(uvloop.run(latencies(running.port, ASKED_S)), 0.99)
        reading = children(running.process.pid)
        peak = memory(running.process.pid)
        beside = sum(map(memory, reading)) // MEGABYTE
        print(f"{shape}: p99 {took_ms:.0f} ms, {peak // MEGABYTE} and {beside} MB; {told}")
    assert took_ms < PATIENCE_MS
    assert peak < MOST and all(memory(pid) < MOST for pid in reading)
    assert told and set(told) <= {"200", "400", "404", "413", "429"}, told


@pytest.mark.parametrize("of", ["router", "replica"])
def test_bodies_that_never_end_take_bounded_memory(served: tuple[Replica, RouterProcess], of: str) -> None:
    running: Replica = served[1] if of == "router" else served[0]
    statuses, peak, left = uvloop.run(unfinished(running.port, running.process.pid))
    print(f"{of}: {peak:.0f} MB at most, {left:.0f} MB left; {statuses}")
    assert peak * MEGABYTE < MOST
    wait_until(lambda: memory(running.process.pid, "VmRSS") < KEPT, "memory is given back")
