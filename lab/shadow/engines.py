"""Hits, times and speeds of the watched time, from the engines' own /metrics. Pure but for `sampled`."""

import asyncio
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from engines import METRICS
from engines.metrics import scraped_pools
from router.console.samples import BadMetrics, Samples
from router.dashboard.doctor.engine_metrics import MetricsDelta
from router.members.broken import Broken
from router.members.members import Server
from router.monitor.learning import ask

TIMED = (*METRICS.first_token_s, *METRICS.prefill_s, *METRICS.between_tokens_s, *METRICS.output_tokens)
READ = frozenset({*METRICS.queries, *METRICS.hits, *(f"{name}{kind}" for name in TIMED for kind in ("_sum", "_count"))})


class Sample(Struct, frozen=True):
    metrics: Samples
    capacity_tokens: int  # of each of its caches; 0: unknown


class Mean(Struct, frozen=True):
    total: float = 0.0
    count: float = 0.0

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)


class Counted(Struct, frozen=True):
    """One replica's counters: their growth during the watched time."""

    query_tokens: float = 0.0
    hit_tokens: float = 0.0
    first_token_s: Mean = Mean()
    prefill_s: float = 0.0
    between_tokens_s: Mean = Mean()
    output_tokens: Mean = Mean()


def counted(first: Sample, last: Sample) -> Counted:
    change = MetricsDelta(first.metrics, last.metrics)

    def mean(names: Iterable[str]) -> Mean:
        sums, counts = ([f"{name}{kind}" for name in names] for kind in ("_sum", "_count"))
        return Mean(change.added(*sums), change.added(*counts))

    return Counted(
        query_tokens=change.added(*METRICS.queries),
        hit_tokens=change.added(*METRICS.hits),
        first_token_s=mean(METRICS.first_token_s),
        prefill_s=mean(METRICS.prefill_s).total,
        between_tokens_s=mean(METRICS.between_tokens_s),
        output_tokens=mean(METRICS.output_tokens),
    )


def summed(each: Iterable[Counted]) -> Counted:
    figures = zip(*map(msgspec.structs.astuple, each), strict=True)
    return Counted(*(sum(values, start=type(values[0])()) for values in figures))


def changes(first: Mapping[str, Sample], last: Mapping[str, Sample]) -> dict[str, Counted]:
    """By replica; those that did not answer twice are left out."""
    return {name: counted(first[name], last[name]) for name in first if name in last}


def sample_of(metrics: bytes) -> Sample | None:
    """Parse /metrics, of which only a few lines are read; None if that is no metrics text."""
    pools = scraped_pools(metrics, METRICS)
    of_all = pools.pop(None, None)  # there may be no ranks
    capacity = max((pool.blocks * pool.block_tokens for pool in pools.values() or filter(None, [of_all])), default=0)
    try:
        return Sample(Samples(metrics.decode(errors="replace"), READ), capacity)
    except BadMetrics:
        return None


async def sampled(servers: Iterable[Server]) -> dict[str, Sample]:
    """Ask all replicas, by name; those that do not answer are left out."""

    async def asked(server: Server) -> Sample | None:
        try:
            answer = await ask(server, "/metrics")
        except Broken:
            return None
        return sample_of(answer.body) if answer.status == 200 else None

    known = list(servers)  # some may join or leave meanwhile
    found = await asyncio.gather(*map(asked, known))
    return {server.name: sample for server, sample in zip(known, found, strict=True) if sample is not None}
