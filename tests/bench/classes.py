"""Simulate nine interactive tenants beside one of class batch that sends more than there is room for.

WARMROUTE_TRACES names a folder with traces, as in `policies`; they are dealt to the nine as in `fairness`. The batch
tenant's long cold prompts bring the load, of which the nine make 0.6 without hits, to 1 and to 3.

At last the nine are of class standard, and the tenth floods them as an interactive tenant.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from lab.percentiles import percentile
from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.trace.requests import Trace, TraceRequest, at_rate
from router.placement.classes import ServiceClass
from tests.bench.fairness import (
    CAPACITY,
    COLD_TOKENS,
    FLOOD,
    INTERACTIVE,
    SETTINGS,
    STANDARD,
    flooded,
    name_of,
    of_classes,
    traces,
)

NINES_LOAD = 0.6
LOADS = (1.0, 3.0)
WAYS: Mapping[str, bool] = {"no": False, "yes": True}


def run(rounds: int) -> None:
    del rounds  # it is the same each time
    for trace in traces():
        measure(at_rate(trace, NINES_LOAD * CAPACITY))


def measure(trace: Trace) -> None:
    begin(trace, INTERACTIVE, "batch")
    show("nine alone", "no", simulated(trace, SETTINGS, "cost", 0), trace)
    for load in LOADS:
        for name, are_used in WAYS.items():
            sent = with_batch(trace, load)
            jobs = simulated(of_classes(sent) if are_used else sent, SETTINGS, "cost", 0)
            show(f"{load:g}", name, jobs, trace)
    begin(trace, STANDARD, "flood")
    for flood, sent in (("no", trace), ("interactive", flooded(trace))):
        jobs = simulated(of_classes(sent, STANDARD, INTERACTIVE), SETTINGS, "cost", 0)
        show(flood, "yes", jobs, trace, STANDARD)


def begin(trace: Trace, service: ServiceClass, tenth: str) -> None:
    print(f"\n{trace.name}, {len(trace.requests):,} requests of nine tenants in {trace.span_s:,.0f} s:\n")
    print(
        f"| {'load' if tenth == 'batch' else tenth} | classes | nine: mean TTFT | p99 | within "
        f"{service.first_token_s:g} s | hits | refused | {tenth}: mean TTFT | longest | refused | computed tokens/s |"
    )
    print("| --- " * 11 + "|")


def with_batch(trace: Trace, load: float) -> Trace:
    every_s = COLD_TOKENS / ((load - NINES_LOAD) * CAPACITY)
    block, count = 1 + max(max(one.blocks) for one in trace.requests), -(-COLD_TOKENS // trace.block_tokens)
    added, at_s = [], 0.0
    while at_s < trace.span_s:
        added.append(TraceRequest(at_s, COLD_TOKENS, 64, tuple(range(block, block + count)), tenant=FLOOD))
        at_s, block = at_s + every_s, block + count
    return Trace(trace.name, trace.block_tokens, sorted([*trace.requests, *added], key=lambda one: one.at_s))


def show(load: str, name: str, jobs: Sequence[Job], trace: Trace, nines: ServiceClass = INTERACTIVE) -> None:
    of_nine = [job for job in jobs if name_of(job) != FLOOD.name]
    of_batch = [job for job in jobs if name_of(job) == FLOOD.name]
    nine, nine_refused = _answered(of_nine)
    batch, batch_refused = _answered(of_batch)
    times = sorted(job.ttft_s for job in nine)
    within = sum(one <= nines.first_token_s for one in times) / len(of_nine)
    hits = 1 - sum(job.uncached_tokens for job in nine) / sum(job.request.input_tokens for job in nine)
    later = [job.ttft_s for job in batch]
    waits = f"{fmean(later):.1f} s | {max(later):.1f} s" if later else "- | -"
    computed = sum(job.uncached_tokens for job in [*nine, *batch] if job.first_s <= trace.span_s)
    print(
        f"| {load} | {name} | {fmean(times):.2f} s | {percentile(times, 0.99):.2f} s | {within:.1%} | {hits:.1%} "
        f"| {nine_refused} | {waits} | {batch_refused} of {len(of_batch)} | {computed / trace.span_s:,.0f} |",
        flush=True,
    )


def _answered(jobs: Sequence[Job]) -> tuple[list[Job], int]:
    found = [job for job in jobs if not job.is_refused]
    return found, len(jobs) - len(found)
