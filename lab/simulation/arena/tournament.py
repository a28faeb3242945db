"""All policies over fleets of several sizes at several loads, and how near each comes to the pooled bound."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import nan
from multiprocessing import get_context
from operator import lt
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict, replace

from api.process.lifeline import die_with_parent
from lab.simulation.arena.rules import RULES
from lab.simulation.comparison import Outcome, compared, duration
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, at_rate
from lab.writing import aligned

WORST, BOUND, OURS = "round-robin", "pooled", "cost"
IN_ORDER = "cost-in-order"  # replicas compute in order of arrival, as they do for the others
POLICIES = ("least-loaded", OURS, IN_ORDER, *RULES)
REPLICAS = (4, 8, 16)
LOADS = (0.6, 0.9, 1.2)


class Run(NamedTuple):
    replicas: int
    load: float
    policy: str


class Standing(Struct, frozen=True):
    """One policy over all fleets and loads: arithmetic means of shares, geometric ones of times."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p99_s: float
    session_mean_s: float | None  # None: the loop is open
    closed: float  # share of the way from round-robin's mean to the bound's; not a number: there is none
    least_closed: float
    ahead: int  # fleets and loads in which its mean is lower than that of `cost`


def runs_of(sizes: Sequence[int], loads: Sequence[float], policies: Sequence[str]) -> list[Run]:
    """The runs of these policies, of round-robin, `cost` and the bound."""
    names = dict.fromkeys((WORST, OURS, IN_ORDER, *policies, BOUND))
    return [Run(size, load, name) for size in sizes for load in loads for name in names]


def outcomes(
    trace: Trace, settings: Settings, runs: Sequence[Run], on_run: Callable[[int], None], **repeats: Any
) -> dict[Run, Outcome]:
    """Simulate the runs on all processors. `repeats`: seeds and jitter, as in `compared`."""
    at_rate(trace, 1.0)  # it raises here, not in a worker, if the trace has no rate
    found: dict[Run, Outcome] = {}
    with get_context("spawn").Pool(min(os.cpu_count() or 1, len(runs)), begin_worker, [os.getpid()]) as pool:
        for one in pool.imap(partial(outcome, trace, replace(settings, working_set=False), repeats), runs):
            found[runs[len(found)]] = one
            on_run(len(found))
    return found


def begin_worker(parent_pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    die_with_parent(parent_pid)


def outcome(trace: Trace, settings: Settings, repeats: dict[str, Any], run: Run) -> Outcome:
    # No other router holds requests or sessions back, so none does here, and all requests count.
    settings = replace(settings, replicas=run.replicas, replica_limit=0, ranked=run.policy != IN_ORDER)
    paced = at_rate(trace, run.load * run.replicas * settings.prefill_tokens_per_s)
    policies = [] if run.policy == BOUND else [OURS if run.policy == IN_ORDER else run.policy]
    return compared(paced, settings, policies, bounds=not policies, **repeats)[0].mean


def standings(found: dict[Run, Outcome], is_closed_loop: bool) -> dict[str, Standing]:
    """Sum up; the mean that counts is that of sessions in a closed loop, else of times to first token."""
    means_s = {run: (is_closed_loop and one.session_mean_s) or one.ttft_mean_s for run, one in found.items()}
    told = {}
    for policy in dict.fromkeys(run.policy for run in found):
        runs = [run for run in found if run.policy == policy]
        own_s, worst_s, bound_s, ours_s = (
            [means_s[run._replace(policy=name)] for run in runs] for name in (policy, WORST, BOUND, OURS)
        )
        ways = zip(worst_s, own_s, bound_s, strict=True)
        closed = [(worst - own) / (worst - bound) for worst, own, bound in ways if worst > bound] or [nan]
        told[policy] = Standing(
            hit_rate=fmean(found[run].hit_rate for run in runs),
            ttft_mean_s=geometric_mean(found[run].ttft_mean_s for run in runs),
            ttft_p99_s=geometric_mean(found[run].ttft_p99_s for run in runs),
            session_mean_s=geometric_mean(own_s) if is_closed_loop else None,
            closed=fmean(closed),
            least_closed=min(closed),
            ahead=sum(map(lt, own_s, ours_s)),
        )
    return told


# ---- as text and as JSON


def lines(trace: Trace, settings: Settings, found: dict[Run, Outcome], told: dict[str, Standing]) -> Iterator[str]:
    sizes, loads = (" ".join(dict.fromkeys(f"{run[at]:g}" for run in found)) for at in (0, 1))
    yield f"{trace.name}: {len(trace.requests):,} requests, {trace.input_tokens:,} input tokens"
    yield f"Fleets of {sizes} replicas, each {settings.capacity_tokens:,} tokens of cache, at loads {loads}"
    yield ""
    table = [["policy", "hits", "TTFT mean", "p99", "closed", "at least", "ahead", "session"]]
    for policy, one in told.items():
        ahead = "" if policy in (OURS, BOUND) else f"{one.ahead} of {len(found) // len(told)}"
        times = duration(one.ttft_mean_s), duration(one.ttft_p99_s)
        shares = f"{one.closed:.1%}", f"{one.least_closed:.1%}"
        table.append([policy, f"{one.hit_rate:.1%}", *times, *shares, ahead, f"{one.session_mean_s or 0:,.0f} s"])
    yield from aligned(row if settings.closed_loop else row[:-1] for row in table)


def as_json(trace: Trace, settings: Settings, found: dict[Run, Outcome], told: dict[str, Standing]) -> dict[str, Any]:
    return {
        "trace": {"name": trace.name, "requests": len(trace.requests), "input_tokens": trace.input_tokens},
        "settings": settings,
        "policies": told,
        "runs": [{**run._asdict(), **asdict(one)} for run, one in found.items()],
    }
