"""Two paced replicas behind a router, for the tests of one client."""

from collections.abc import Iterator

import pytest

from tests.chaos.routers import Fleet, RouterProcess, fleet, router

RATES = (
    *("--set=simulated_prefill_tokens_per_s=1e6", "--set=simulated_decode_tokens_per_s=200"),
    "--set=simulated_step_overhead=0",
)


@pytest.fixture(scope="module")
def replicas() -> Iterator[Fleet]:
    with fleet(2, *RATES) as started:
        yield started


@pytest.fixture(scope="module")
def served(replicas: Fleet) -> Iterator[RouterProcess]:
    with router(*replicas.as_options, "--log-level", "error") as running:
        yield running
