"""Figures from two samples of an engine's /metrics. A counter that fell was reset in between.

Add each metric that is read here to READ, if no profile has it.
"""

from collections.abc import Iterable

from engines import METRICS, NATIVE, PROFILES
from engines.metrics import words_of
from router.console.samples import Samples
from router.dashboard.doctor.figures import EngineFigures

READ = frozenset(
    {
        *words_of(METRICS),
        "warmroute:cached_blocks",
        "warmroute:cpu_wait_seconds_total",
        "warmroute:draining",
        "warmroute:free_blocks",
        "warmroute:kv_events_total",
        "warmroute:num_blocks",
        "warmroute:prefix_cache_query_blocks_total",
        "warmroute:requests_refused_total",
        "warmroute:unreferenced_blocks",
    }
)
MAX_COUNTED = 2.0**31


class MetricsDelta:
    """Changes between two samples of /metrics."""

    def __init__(self, first: Samples, last: Samples) -> None:
        self.first, self.last = first, last

    def grown(self, *names: str, **labels: str) -> float | None:
        """The increase of a counter; None if there is no such counter."""
        now = self.last.total(*names, **labels)
        before = self.first.total(*names, **labels) or 0.0
        return None if now is None else now if now < before else now - before

    def added(self, *names: str, **labels: str) -> float:
        return self.grown(*names, **labels) or 0.0

    def by(self, name: str, label: str) -> dict[str, float]:
        before = self.first.by(name, label)
        grown = {key: now - before.get(key, 0.0) for key, now in self.last.by(name, label).items()}
        return {key: change for key, change in grown.items() if change > 0}


def engine_figures(
    first: Samples, now: Samples, index: tuple[float, float] | None = None, sends_events: bool | None = None
) -> EngineFigures | None:
    """Figures of an engine. `index`: its blocks in the router's index, and their increase."""

    def waiting(sample: Samples) -> float | None:
        """Requests that wait for room, without those that an engine holds back for other reasons."""
        for_room = sample.total(*METRICS.waiting_by_reason, reason="capacity")
        return sample.total(*METRICS.waiting) if for_room is None else for_room

    change = MetricsDelta(first, now)
    if now.total(*METRICS.prompt_tokens) is None:
        return None  # not an engine
    engine = NATIVE.name  # ours has names of others beside its own
    if now.total("warmroute:num_blocks") is None:
        others = (one for one in PROFILES.values() if one is not NATIVE)
        engine = next(one.name for one in others if now.total(*one.metrics.prompt_tokens) is not None)
    block_tokens, total_blocks = _cache_size(now)
    free, reusable = now.total("warmroute:free_blocks"), now.total("warmroute:unreferenced_blocks")
    full = None
    if total_blocks and free is not None and reusable is not None:
        full = 1 - (free - reusable) / total_blocks
    elif total_blocks and index is not None:
        full = min(1.0, index[0] / total_blocks)
    caching = next((found for info in METRICS.caching if (found := now.label(*info)) is not None), "").lower()
    queries, hits = change.grown(*METRICS.queries), change.grown(*METRICS.hits)
    return EngineFigures(
        engine=engine,
        block_tokens=block_tokens,
        total_blocks=total_blocks,
        usage=_lowest(sample.most(*METRICS.usage) for sample in (first, now)),
        full=full,
        evicted_blocks=_evicted(change, block_tokens, index),
        query_tokens=queries,
        hit_tokens=hits,
        query_blocks=change.grown("warmroute:prefix_cache_query_blocks_total"),
        prompts=change.added(*METRICS.prompts),
        prompt_tokens=change.added(*METRICS.prompt_tokens),
        preemptions=change.grown(*METRICS.preemptions),
        refused=change.added("warmroute:requests_refused_total", reason="full"),
        caching=caching == "true" if caching in ("true", "false") else None,
        cached_blocks=now.total("warmroute:cached_blocks"),
        prompt_tokens_ever=now.total(*METRICS.prompt_tokens) or 0.0,
        hit_tokens_ever=now.total(*METRICS.hits),
        events_ever=now.total("warmroute:kv_events_total"),
        draining=bool(now.total("warmroute:draining")),
        sends_events=sends_events,
        running=_lowest(sample.total(*METRICS.running) for sample in (first, now)),
        waiting=_lowest(waiting(sample) for sample in (first, now)),
        cpu_wait_s=change.grown("warmroute:cpu_wait_seconds_total"),
    )


def _lowest(readings: Iterable[float | None]) -> float | None:
    return min((one for one in readings if one is not None), default=None)


def _cache_size(metrics: Samples) -> tuple[int, int]:
    """Tokens per block and number of blocks; 0: unknown."""
    for name, size, count in METRICS.cache_infos:
        tokens, blocks = metrics.label(name, size) or "", metrics.label(name, count) or ""
        if tokens.isdecimal():
            return int(tokens), int(blocks) if blocks.isdecimal() else 0
    sizes, counts = zip(*METRICS.cache_gauges, strict=True)
    return _count(metrics.most(*sizes)), _count(metrics.total(*counts))


def _count(value: float | None) -> int:
    """The value of a gauge that counts; 0 if it cannot be one."""
    return int(value) if value is not None and 0 <= value < MAX_COUNTED else 0


def _evicted(change: MetricsDelta, block_tokens: int, index: tuple[float, float] | None) -> float | None:
    """Evicted blocks. Without a counter, they are the stored blocks that did not make the cache grow."""
    counted = change.grown(*METRICS.evicted_blocks)
    if counted is not None or not block_tokens:
        return counted
    tokens, queries = change.grown(*METRICS.evicted_tokens), change.grown(*METRICS.queries)
    if tokens is not None:
        return tokens / block_tokens
    if index is None or queries is None:
        return None
    return max(0.0, (queries - change.added(*METRICS.hits)) / block_tokens - index[1])
