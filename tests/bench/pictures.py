"""Draws pictures of docs/ that are of simulated traffic, and so always the same."""

from pathlib import Path

from lab.analysis import report as curves
from lab.analysis.accesses import accesses_of
from lab.analysis.curve import curve_of
from lab.simulation import report as ttfts
from lab.simulation.settings import Settings
from tests.bench.policies import REQUESTS, Case
from tests.lab.traffic import conversations

DOCS = Path(__file__).parents[2] / "docs"
POLICIES = ("round-robin", "least-loaded", "prefix", "cost")


def run(rounds: int) -> None:
    del rounds  # the seeds are fixed
    trace, settings = conversations(REQUESTS), Settings(replicas=8)
    ttfts.plot(DOCS / "ttft.svg", trace, settings, Case(trace, settings).rows(POLICIES))
    curves.plot(DOCS / "curve.svg", trace.name, curve_of(accesses_of(trace)))
    print(f"{DOCS / 'ttft.svg'} and {DOCS / 'curve.svg'} are drawn")
