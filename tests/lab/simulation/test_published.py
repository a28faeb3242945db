"""Policies on traces that others have published find what others have found, and the default one what docs/ say.

Single runs near saturation differ by some per cent; the limits leave room for that.
"""

import pytest
from msgspec.structs import replace

from lab.simulation.comparison import Outcome, outcome_of
from lab.simulation.fleet import simulated
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, at_rate, coarsened
from tests.lab.published import published

SETTINGS = Settings(replicas=8)
RATE = SETTINGS.prefill_tokens_per_s
LOAD = 0.9


def outcome(trace: Trace, policy: str, settings: Settings = SETTINGS) -> Outcome:
    paced = at_rate(trace, LOAD * settings.replicas * RATE)
    return outcome_of(simulated(paced, settings, policy, 0), settings.replicas, RATE)


pytestmark = pytest.mark.grid


@pytest.mark.parametrize(
    ("policy", "hits", "mean_s", "p99_s"),
    [("round-robin", 0.058, 9.0, 37.0), ("least-loaded", 0.057, 2.6, 12.0), ("prefix", 0.152, 2.1, 11.5)],
)
def test_an_independent_simulator_has_found_the_same(policy: str, hits: float, mean_s: float, p99_s: float) -> None:
    by_events = replace(SETTINGS, optimistic=policy != "prefix")
    found = outcome(published("mooncake_conversation"), policy, by_events)
    assert found.hit_rate == pytest.approx(hits, abs=0.01)
    assert found.ttft_mean_s == pytest.approx(mean_s, rel=0.1)
    assert found.ttft_p99_s == pytest.approx(p99_s, rel=0.1)


@pytest.mark.parametrize(
    ("name", "coarser", "least_hits", "most_mean_s"),
    [
        ("mooncake_conversation", 1, 0.139, 1.8),
        ("weka_agentic_a", 16, 0.70, 4.2),
        ("azure_conv_noreuse", 1, 0, 11.95),
    ],
)
def test_the_default_policy_does_what_its_docs_say(
    name: str, coarser: int, least_hits: float, most_mean_s: float
) -> None:
    found = outcome(coarsened(published(name), coarser), "cost")
    assert found.hit_rate >= least_hits
    assert found.ttft_mean_s <= most_mean_s
