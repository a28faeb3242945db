"""Simulate one tenant's flood of long cold prompts beside nine others: with fair shares, other rules, and classes.

WARMROUTE_TRACES names a folder with traces, as in `policies`; of each the first requests are dealt to nine tenants by
conversation. The tenth sends ten times its share of what the replicas can compute, from a quarter of the trace on.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple
from unittest.mock import patch

from msgspec.structs import replace

from lab.percentiles import percentile
from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.simulation.settings import Settings
from lab.trace.formats import read_trace
from lab.trace.requests import Trace, TraceRequest, at_rate
from router.placement.classes import FIRST_TOKEN_S, NAMES, WEIGHTS, ServiceClass
from router.placement.cost import Candidate, Tenant
from router.placement.shares import Shares
from tests.bench.policies import FOLDER
from tests.lab.traffic import agents, conversations

SETTINGS = Settings(replicas=4)
CAPACITY = SETTINGS.replicas * SETTINGS.prefill_tokens_per_s
NINE, FLOOD = [Tenant(f"tenant-{number}") for number in range(9)], Tenant("flood")
TIMES = 10  # its share
COLD_TOKENS = 16_384
LOAD = 0.7  # of the nine, cached or not
REQUESTS = 2500


class Nothing(Shares):
    """Nobody stands back."""

    def behind_s(self, tenant: Tenant, candidates: Sequence[Candidate], now_s: float) -> float:  # noqa: ARG002
        return 0.0


class ByTurns(Shares):
    """Round robin over tenants: each prompt counts the same, however long it is."""

    EACH = 4096.0

    def asked(self, tenant: Tenant, tokens: float, now_s: float) -> None:  # noqa: ARG002
        super().asked(tenant, self.EACH, now_s)

    def generated(self, tenant: Tenant, tokens: int) -> None:
        """Count nothing."""

    def spared(self, tenant: Tenant, tokens: float) -> None:  # noqa: ARG002
        super().spared(tenant, self.EACH)


class Way(NamedTuple):
    shares: type[Shares]
    has_classes: bool = False  # the nine are interactive, and the flood is batch work


WAYS: Mapping[str, Way] = {
    "no": Way(Nothing),
    "by turns": Way(ByTurns),
    "**yes**": Way(Shares),
    "**classes**": Way(Shares, has_classes=True),
}
INTERACTIVE, STANDARD, BATCH = (
    ServiceClass(name, NAMES.index(name), FIRST_TOKEN_S[name], WEIGHTS[name]) for name in NAMES
)


def run(rounds: int) -> None:
    del rounds  # it is the same each time
    for trace in traces():
        measure(trace)


def traces() -> Iterator[Trace]:
    folder = os.environ.get(FOLDER)
    if folder is None:
        yield from map(dealt, (conversations(REQUESTS), agents(REQUESTS)))
        return
    for path in sorted(Path(folder).glob("*.jsonl*")):
        yield dealt(read_trace(path))


def dealt(trace: Trace) -> Trace:
    paced = at_rate(Trace(trace.name, trace.block_tokens, trace.requests[:REQUESTS]), LOAD * CAPACITY)
    return Trace(trace.name, trace.block_tokens, list(of_tenants(paced.requests)))


def of_tenants(requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    """Give each new conversation to the tenant with the fewest tokens so far."""
    tenant_of: dict[int, Tenant] = {}  # by block
    tokens = dict.fromkeys([one.name for one in NINE], 0)
    for one in requests:
        known = next((i + 1 for i in reversed(range(len(one.blocks) - 1)) if one.blocks[i] in tenant_of), 0)
        goes_on = 2 * known > len(one.blocks)
        tenant = tenant_of[one.blocks[known - 1]] if goes_on else min(NINE, key=lambda one: tokens[one.name])
        for block in one.blocks:
            tenant_of.setdefault(block, tenant)
        tokens[tenant.name] += one.input_tokens
        yield one._replace(tenant=tenant)


def flooded(trace: Trace) -> Trace:
    every_s = COLD_TOKENS / (TIMES * CAPACITY / (len(NINE) + 1))
    block, count = 1 + max(max(one.blocks) for one in trace.requests), -(-COLD_TOKENS // trace.block_tokens)
    added, at_s = [], trace.span_s / 4
    while at_s < trace.span_s:
        added.append(TraceRequest(at_s, COLD_TOKENS, 64, tuple(range(block, block + count)), tenant=FLOOD))
        at_s, block = at_s + every_s, block + count
    return Trace(trace.name, trace.block_tokens, sorted([*trace.requests, *added], key=lambda one: one.at_s))


def of_classes(trace: Trace, nine: ServiceClass = INTERACTIVE, flood: ServiceClass = BATCH) -> Trace:
    """Give each tenant its class, and its weight with it."""
    requests = []
    for one in trace.requests:
        assert one.tenant is not None, "each has one"
        service = flood if one.tenant.name == FLOOD.name else nine
        requests.append(one._replace(tenant=replace(one.tenant, weight=service.weight, service=service)))
    return Trace(trace.name, trace.block_tokens, requests)


def measure(trace: Trace) -> None:
    print(f"\n{trace.name}, {len(trace.requests):,} requests of nine tenants in {trace.span_s:,.0f} s:\n")
    print(
        "| flood | shares | nine: mean TTFT | p99 | times the first | hits | computed tokens/s "
        "| of these the flood's | refused, of these the nine's | fairness |"
    )
    print("| --- " * 10 + "|")
    alone: list[Job] = []
    for flood, sent in (("no", trace), ("yes", flooded(trace))):
        for name, way in WAYS.items():
            with patch("router.placement.placement.Shares", way.shares):
                jobs = simulated(of_classes(sent) if way.has_classes else sent, SETTINGS, "cost", 0)
            alone = alone or jobs
            show(flood, name, jobs, trace, alone)


def show(flood: str, name: str, jobs: Sequence[Job], trace: Trace, alone: Sequence[Job]) -> None:
    from_s, span_s = trace.span_s / 4, trace.span_s
    nine = [job for job in jobs if name_of(job) != FLOOD.name and job.request.at_s >= from_s and not job.is_refused]
    times = sorted(job.ttft_s for job in nine)
    before = sorted(job.ttft_s for job in alone if job.request.at_s >= from_s)
    hits = 1 - sum(job.uncached_tokens for job in nine) / sum(job.request.input_tokens for job in nine)
    refused = [job for job in jobs if job.is_refused]
    given = dict.fromkeys([one.name for one in (*NINE, FLOOD)], 0)
    for job in jobs:
        if from_s <= job.first_s <= span_s and not job.is_refused:
            given[name_of(job)] += job.uncached_tokens
    p99_s, ratio = percentile(times, 0.99), percentile(times, 0.99) / percentile(before, 0.99)
    print(
        f"| {flood} | {name} | {fmean(times):.2f} s | {p99_s:.1f} s | {ratio:.2f} | {hits:.1%} "
        f"| {sum(given.values()) / (span_s - from_s):,.0f} | {given[FLOOD.name] / (span_s - from_s):,.0f} "
        f"| {len(refused)}, {sum(name_of(job) != FLOOD.name for job in refused)} "
        f"| {fairness(jobs, given, from_s, span_s):.3f} |",
        flush=True,
    )


def name_of(job: Job) -> str:
    return "" if job.request.tenant is None else job.request.tenant.name


def fairness(jobs: Sequence[Job], given: Mapping[str, int], from_s: float, span_s: float) -> float:
    """Jain's index of what each tenant was given beside its fair part of as much: 1 is fair, 0.1 the opposite."""
    wanted = dict.fromkeys(given, 0)
    for job in jobs:
        if from_s <= job.request.at_s <= span_s:
            wanted[name_of(job)] += job.uncached_tokens or job.request.input_tokens
    left, fair = sum(given.values()), dict[str, float]()
    for tenant in sorted(wanted, key=wanted.__getitem__):
        fair[tenant] = min(wanted[tenant], left / (len(wanted) - len(fair)))
        left -= round(fair[tenant])
    ratios = [given[tenant] / fair[tenant] for tenant in given if fair[tenant]]
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
