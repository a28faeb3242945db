"""Draws pictures of docs/ that are of simulated traffic, and so always the same."""

from pathlib import Path

from lab.analysis import report as curves
from lab.analysis.accesses import accesses_of
from lab.analysis.curve import curve_of
from lab.simulation import report as ttfts
from lab.simulation.comparison import compared
from lab.simulation.settings import Settings
from lab.trace.requests import at_rate
from tests.bench.policies import JITTER_S, LOAD, REQUESTS, RUNS
from tests.lab.traffic import conversations

DOCS = Path(__file__).parents[2] / "docs"
POLICIES = ("round-robin", "least-loaded", "prefix", "cost")


def run(rounds: int) -> None:
    del rounds  # the seeds are fixed
    trace, settings = conversations(REQUESTS), Settings(replicas=8)
    paced = at_rate(trace, LOAD * settings.replicas * settings.prefill_tokens_per_s)
    rows = compared(paced, settings, POLICIES, seeds=RUNS, jitter_s=JITTER_S)
    ttfts.plot(DOCS / "ttft.svg", trace, settings, rows)
    curves.plot(DOCS / "curve.svg", trace.name, curve_of(accesses_of(trace)))
    print(f"{DOCS / 'ttft.svg'} and {DOCS / 'curve.svg'} are drawn")
