"""Draws pictures of docs/ that are of simulated traffic, and so always the same."""

from pathlib import Path
from statistics import fmean

import numpy as np

from lab.analysis.accesses import accesses_of
from lab.analysis.curve import curve_of
from lab.percentiles import percentile
from lab.simulation.comparison import BOUNDS
from lab.simulation.fleet import simulated
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, at_rate, jittered
from tests.bench.drawing import drawing
from tests.bench.policies import JITTER_S, LOAD, REQUESTS, RUNS
from tests.lab.traffic import conversations

DOCS = Path(__file__).parents[2] / "docs"
POLICIES = ("round-robin", "least-loaded", "prefix", "cost")
POINTS = 400


def run(rounds: int) -> None:
    del rounds  # the seeds are fixed
    trace = conversations(REQUESTS)
    draw_ttfts(trace, DOCS / "ttft.svg")
    draw_curve(trace, DOCS / "curve.svg")
    print(f"{DOCS / 'ttft.svg'} and {DOCS / 'curve.svg'} are drawn")


def draw_ttfts(trace: Trace, path: Path) -> None:
    settings = Settings(replicas=8)
    paced = at_rate(trace, LOAD * settings.replicas * settings.prefill_tokens_per_s)
    shares = [place / POINTS for place in range(POINTS + 1)]
    title = f"{trace.name}, {settings.replicas} replicas of {settings.capacity_tokens:,} tokens"
    with drawing(path, title=title, x="time to first token, s", y="share of requests") as axes:
        for name in (*POLICIES, *BOUNDS):
            ttfts_s: list[float] = []
            for seed in range(RUNS):
                traffic, bound = jittered(paced, JITTER_S, seed), BOUNDS.get(name)
                jobs = bound(traffic, settings) if bound else simulated(traffic, settings, name, seed)
                ttfts_s += [job.ttft_s for job in jobs if not job.is_refused]
            style = {"color": "grey", "linestyle": "--" if name == "pooled" else ":"} if name in BOUNDS else {}
            times_s = sorted(ttfts_s)
            label = f"{name}, mean {fmean(times_s):,.2f} s"
            axes.plot([percentile(times_s, share) for share in shares], shares, label=label, **style)
        axes.set_xscale("log")
        axes.set_ylim(0, 1)


def draw_curve(trace: Trace, path: Path) -> None:
    curve = curve_of(accesses_of(trace))
    blocks = np.unique(np.geomspace(1, max(curve.most_blocks, 1), POINTS).astype(np.int64)).tolist()
    with drawing(path, title=f"{trace.name}: hit rate of an LRU cache", x="cache, tokens", y="hit rate") as axes:
        tokens = [each * curve.block_tokens for each in blocks]
        axes.step(tokens, [curve.hit_rate(each) for each in blocks], where="post")
        axes.axhline(curve.hit_rate(curve.most_blocks), linestyle=":", color="gray", label="without an end")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
