"""The reason for a decision, from its record."""

from typing import Any

import pytest

from router.console.top.tables import reason_for
from router.responses import Considered
from tests.router.console.top.samples import a_decision

WARM, COLD = Considered("r0", 1024, 0.05), Considered("r1", 0, 0.25)


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ([WARM, COLD], "most cached, +1,024"),
        ([Considered("r0", 0, 0.1), Considered("r1", 512, 0.6)], "r1 has +512, but costs 500 ms more"),
        ([Considered("r0", 0, 0.1), Considered("r1", 0, 0.2)], "cold: lowest cost"),
        ([Considered("r0", 16, 0.1), Considered("r1", 16, 0.2)], "tied: lowest cost"),
        ([Considered("r0", 16, 0.21), Considered("r1", 16, 0.2)], "tied: at random"),
        ([WARM, Considered("r1", 4096, None)], "the only eligible replica"),
        ([COLD], ""),
    ],
)
def test_costs_and_caches_are_compared(candidates: list[Considered], reason: str) -> None:
    assert reason_for(a_decision(candidates=candidates)) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy": "round-robin"}, "its turn"),
        ({"policy": "random"}, "at random"),
        ({"policy": "least-loaded"}, "least loaded"),
        ({"retries": 1}, "most cached, +1,024, after 1 retry"),
        ({"retries": 2, "resumes": 1}, "most cached, +1,024, after 2 retries, resumed 1 time"),
        ({"status": 0}, "most cached, +1,024, the client left"),
        ({"status": 429, "chosen": None, "why": "the queue is full"}, "the queue is full, status 429"),
    ],
)
def test_policies_failures_and_endings_are_named(changes: dict[str, Any], reason: str) -> None:
    assert reason_for(a_decision(**changes)) == reason
