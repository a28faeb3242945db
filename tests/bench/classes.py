"""Simulate nine interactive tenants beside one of class batch that sends more than there is room for.

WARMROUTE_TRACES names a folder with traces, as in `policies`; they are dealt to the nine as in `fairness`. The batch
tenant's long cold prompts bring the load, of which the nine make 0.6 without hits, to 1 and to 3.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from lab.percentiles import percentile
from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.trace.requests import Trace, TraceRequest
from lab.trace.shaping import at_rate
from router.placement.classes import FIRST_TOKEN_S, NAMES, WEIGHTS, ServiceClass
from router.placement.cost import Tenant
from tests.bench.fairness import CAPACITY, COLD_TOKENS, SETTINGS, traces

INTERACTIVE, _, BATCH = [
    ServiceClass(name, level, FIRST_TOKEN_S[name], WEIGHTS[name]) for level, name in enumerate(NAMES)
]
NINES_LOAD = 0.6
LOADS = (1.0, 3.0)
WAYS: Mapping[str, bool] = {"no": False, "yes": True}


def run(rounds: int) -> None:
    del rounds  # it is the same each time
    for trace in traces():
        measure(at_rate(trace, NINES_LOAD * CAPACITY))


def measure(trace: Trace) -> None:
    print(f"\n{trace.name}, {len(trace.requests):,} requests of nine tenants in {trace.span_s:,.0f} s:\n")
    print(
        "| load | classes | nine: mean TTFT | p99 | within 2 s | hits | refused "
        "| batch: mean TTFT | longest | refused | computed tokens/s |"
    )
    print("| --- " * 11 + "|")
    show("nine alone", "no", simulated(of_classes(trace, are_used=False), SETTINGS, "cost", 0), trace)
    for load in LOADS:
        for name, are_used in WAYS.items():
            jobs = simulated(of_classes(with_batch(trace, load), are_used=are_used), SETTINGS, "cost", 0)
            show(f"{load:g}", name, jobs, trace)


def with_batch(trace: Trace, load: float) -> Trace:
    every_s = COLD_TOKENS / ((load - NINES_LOAD) * CAPACITY)
    block, count = 1 + max(max(one.blocks) for one in trace.requests), -(-COLD_TOKENS // trace.block_tokens)
    added, at_s = [], 0.0
    while at_s < trace.span_s:
        added.append(TraceRequest(at_s, COLD_TOKENS, 64, tuple(range(block, block + count))))
        at_s, block = at_s + every_s, block + count
    return Trace(trace.name, trace.block_tokens, sorted([*trace.requests, *added], key=lambda one: one.at_s))


def of_classes(trace: Trace, *, are_used: bool) -> Trace:
    """Name the batch tenant, and give each tenant its class and its weight if there are classes."""
    requests = []
    for one in trace.requests:
        name, service = ("batch", BATCH) if one.tenant is None else (one.tenant.name, INTERACTIVE)
        tenant = Tenant(name, weight=service.weight, service=service) if are_used else Tenant(name)
        requests.append(one._replace(tenant=tenant))
    return Trace(trace.name, trace.block_tokens, requests)


def show(load: str, name: str, jobs: Sequence[Job], trace: Trace) -> None:
    by_name: dict[bool, list[Job]] = {False: [], True: []}
    for job in jobs:
        assert job.request.tenant is not None, "each has one"
        by_name[job.request.tenant.name == "batch"].append(job)
    nine, nine_refused = _answered(by_name[False])
    batch, batch_refused = _answered(by_name[True])
    times = sorted(job.ttft_s for job in nine)
    within = sum(one <= INTERACTIVE.first_token_s for one in times) / len(by_name[False])
    hits = 1 - sum(job.uncached_tokens for job in nine) / sum(job.request.input_tokens for job in nine)
    later = [job.ttft_s for job in batch]
    of_batch = f"{fmean(later):.1f} s | {max(later):.1f} s" if later else "- | -"
    computed = sum(job.uncached_tokens for job in [*nine, *batch] if job.first_s <= trace.span_s)
    print(
        f"| {load} | {name} | {fmean(times):.2f} s | {percentile(times, 0.99):.2f} s | {within:.1%} | {hits:.1%} "
        f"| {nine_refused} | {of_batch} | {batch_refused} of {len(by_name[True])} | {computed / trace.span_s:,.0f} |",
        flush=True,
    )


def _answered(jobs: Sequence[Job]) -> tuple[list[Job], int]:
    found = [job for job in jobs if not job.is_refused]
    return found, len(jobs) - len(found)
