"""Several policies and the bounds on the same traffic, once per seed."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from lab.simulation.bounds import ideal, pooled
from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.simulation.outcome import Outcome, mean_of, outcome_of
from lab.simulation.settings import Settings
from lab.trace.requests import Trace
from lab.trace.shaping import jittered

BOUNDS = {"pooled": pooled, "ideal": ideal}


class Row(Struct, frozen=True):
    """Results of one policy or bound; `ttft_s` has the sorted times of all runs together."""

    name: str
    is_bound: bool
    mean: Outcome
    runs: list[Outcome]
    ttft_s: list[float]


def compared(
    trace: Trace,
    settings: Settings,
    policies: Sequence[str],
    *,
    seeds: int = 1,
    jitter_s: float = 0.0,
    bounds: bool = True,
    on_request: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Simulate each policy, and each bound, on the same arrivals."""
    paced = [jittered(trace, jitter_s, seed) for seed in range(seeds)]
    rows = []
    for policy in policies:
        runs = [simulated(one, settings, policy, seed, on_request) for seed, one in enumerate(paced)]
        rows.append(_row(policy, runs, settings.replicas, settings.prefill_tokens_per_s))
    for name, bound in BOUNDS.items() if bounds else ():
        runs = [bound(one, settings, on_request) for one in paced]
        rows.append(_row(name, runs, 1, settings.prefill_tokens_per_s * settings.replicas, is_bound=True))
    return rows


def _row(name: str, runs: list[list[Job]], replicas: int, rate: float, *, is_bound: bool = False) -> Row:
    outcomes = [outcome_of(jobs, replicas, rate) for jobs in runs]
    times = sorted(job.ttft_s for jobs in runs for job in jobs if not job.is_refused)
    return Row(name, is_bound, mean_of(outcomes), outcomes, times)
