"""Follows replicas as the router does, and reads from their own /metrics what happened in the watched time."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct

from api.process.settings import Unusable
from api.process.tasks import end
from engines import METRICS
from engines.metrics import scraped_pools
from router.config import RouterConfig
from router.console.samples import BadMetrics, Samples
from router.dashboard.doctor.engine_metrics import MetricsDelta
from router.members.broken import Broken
from router.members.discovery.desired import CombinedDiscovery
from router.members.members import Server
from router.monitor.learning import ask
from router.process.front import assembled, discoveries
from router.proxy.services import Services
from router.tenants.admission import Admission

READY_WITHIN_S = 30.0
LOOK_S = 0.05
TIMED = (*METRICS.first_token_s, *METRICS.prefill_s, *METRICS.between_tokens_s, *METRICS.output_tokens)
READ = frozenset({*METRICS.queries, *METRICS.hits, *(f"{name}{kind}" for name in TIMED for kind in ("_sum", "_count"))})


@asynccontextmanager
async def following(config: RouterConfig) -> AsyncIterator[Services]:
    """Run a router that follows replicas as the real one does, and is sent no requests."""
    try:
        router, upkeep = assembled(config, Admission())
    except (OSError, ValueError) as error:
        raise Unusable(str(error)) from error
    discovery = CombinedDiscovery(discoveries(config))
    tasks = [asyncio.create_task(discovery.run(upkeep.apply)), asyncio.create_task(upkeep.tick())]
    try:
        yield router
    finally:
        await end(tasks)
        await upkeep.close()
        router.feeds.close()
        await router.reading.close()
        router.close()


async def wait_ready(services: Services) -> None:
    """Wait until all replicas are followed; some are enough after a while. Raise Unusable if there is none."""
    until_s = services.now_s() + READY_WITHIN_S
    while services.lifecycle.not_ready(all_of_them=True) is not None and services.now_s() < until_s:
        await asyncio.sleep(LOOK_S)
    if (why_not := services.lifecycle.not_ready()) is not None:
        raise Unusable(f"{why_not}; check --replica")


class Sample(Struct, frozen=True):
    metrics: Samples
    capacity_tokens: int  # the size of each of its caches; 0: unknown


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
    known = list(servers)  # some may join or leave meanwhile
    answers = await asyncio.gather(*(ask(server, "/metrics") for server in known), return_exceptions=True)
    found = {}
    for server, answer in zip(known, answers, strict=True):
        if isinstance(answer, BaseException):
            if not isinstance(answer, Broken):
                raise answer
        elif answer.status == 200 and (sample := sample_of(answer.body)) is not None:
            found[server.name] = sample
    return found


class Followed(Struct, frozen=True):
    """A replica, as it is known at the end."""

    name: str
    models: tuple[str, ...]
    native: bool
    doubt: str | None  # why its tree may differ from its cache; None: it is exact
    capacity_tokens: int  # 0: unknown
    prefill_tokens_per_s: float  # 0: unknown


def followed(services: Services, samples: dict[str, Sample]) -> list[Followed]:
    found = []
    for member in services.members:
        sample, tells = samples.get(member.server.name), member.profile.publishes_status
        capacity_tokens = sample.capacity_tokens if sample is not None else 0
        rate = member.candidate.prefill_tokens_per_s if tells else 0.0
        found.append(Followed(member.name, member.models, tells, services.doubt(member), capacity_tokens, rate))
    return found


class Mean(Struct, frozen=True):
    total: float = 0.0
    count: float = 0.0

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)


class Counted(Struct, frozen=True):
    """One replica's counters, or the sums of several: their growth during the watched time."""

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
