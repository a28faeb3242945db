"""The curve of hits over cache size equals the simulator's result for one replica."""

import pytest
from msgspec.structs import replace

from lab.analysis.accesses import accesses_of
from lab.analysis.curve import curve_of
from lab.simulation.comparison import outcome_of
from lab.simulation.fleet import simulated
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, at_rate, coarsened
from tests.lab.published import published
from tests.lab.traffic import agents, conversations

TRACES = [conversations(400), coarsened(agents(400), 4)]
SOME_REQUESTS = 3000
LOAD = 0.02  # so low that hardly any two requests run at once: one that runs holds blocks that are not evicted


@pytest.mark.parametrize("capacity_tokens", [300_000, 427_232])
@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_the_curve_agrees_with_the_simulator(trace: Trace, capacity_tokens: int) -> None:
    agree(trace, capacity_tokens)


@pytest.mark.grid
def test_they_agree_on_a_published_trace() -> None:
    whole = published("mooncake_conversation")
    agree(replace(whole, requests=whole.requests[:SOME_REQUESTS]), 2_000_000)


def agree(trace: Trace, capacity_tokens: int) -> None:
    settings = Settings(replicas=1, capacity_tokens=capacity_tokens)
    paced = at_rate(trace, LOAD * settings.prefill_tokens_per_s)
    found = outcome_of(simulated(paced, settings, "round-robin", 0), 1, settings.prefill_tokens_per_s).hit_rate
    curve = curve_of(accesses_of(paced))
    assert curve.hit_rate(settings.capacity_blocks(trace.block_tokens)) == pytest.approx(found, abs=0.005)
    assert curve.hit_rate(settings.capacity_blocks(trace.block_tokens) // 8) < found - 0.02
