"""Figures that engines tell at /metrics: the names that they use, and a reading of their text. Pure.

A text may come from a broken or hostile machine: searches are bounded, and no expression runs over all of it.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec
from msgspec import Struct

MAX_REQUESTS = 10**6  # One replica has no more.
MAX_BLOCKS = 2**31  # One replica's pool has no more.
MAX_STEPS = 4096  # lines, of all ranks
LONGEST_LINE = 1024
MAX_SEARCHED_BYTES = 2**20  # the lines of all ranks stand together

# No label reaches past its line: a text of nothing but open braces would take hours.
_QUEUE = r"^(%s)(?:\{([^}\n]*)\})? ([0-9.eE+-]{1,32})"
_INFO = r"^(?:%s)\{([^}\n]{0,4096})\}"
_GAUGE = r"^(%s)(?:\{([^}\n]{0,4096})\})? ([0-9.eE+]{1,32})$"
_FIGURE = re.compile(rb'(?:^|,)([a-z_]+)="([0-9]{1,10})"')


class EngineMetrics(Struct, frozen=True, kw_only=True):
    """Names of metrics, by what they tell. Of several names for one figure, the first that is there counts."""

    rank_labels: tuple[str, ...] = ()
    # The router's health checks and the fleet's probes read these.
    running: tuple[str, ...] = ()  # requests
    waiting: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()  # only steps change these: requests may come and wait while an engine computes nothing
    awake: tuple[tuple[str, str], ...] = ()  # a gauge and its label: 0 while a rank sleeps, which takes requests
    cache_infos: tuple[tuple[str, str, str], ...] = ()  # a metric, and its labels for tokens per block and blocks
    cache_gauges: tuple[tuple[str, str], ...] = ()  # the same as two gauges, which each process of a rank sets
    speculating: tuple[str, ...] = ()  # is there if it drafts tokens
    # The doctor and shadows read these, too.
    waiting_by_reason: tuple[str, ...] = ()
    usage: tuple[str, ...] = ()
    queries: tuple[str, ...] = ()  # tokens of prompts
    hits: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    prompt_tokens: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    evicted_blocks: tuple[str, ...] = ()
    evicted_tokens: tuple[str, ...] = ()
    caching: tuple[tuple[str, str], ...] = ()  # a metric and its label: whether prefix caching is on
    first_token_s: tuple[str, ...] = ()  # names from here on have no _sum and _count
    prefill_s: tuple[str, ...] = ()
    between_tokens_s: tuple[str, ...] = ()
    output_tokens: tuple[str, ...] = ()


class Pool(Struct, frozen=True):
    """A cache on a GPU, as its engine describes it."""

    blocks: int
    block_tokens: int


def merged(metrics: Iterable[EngineMetrics]) -> EngineMetrics:
    """The names of several engines, for a text of any of them."""
    each = [msgspec.structs.asdict(one) for one in metrics]
    return EngineMetrics(**{name: tuple(dict.fromkeys(chain(*(one[name] for one in each)))) for name in each[0]})


def words_of(metrics: EngineMetrics) -> Iterator[str]:
    """Yield all names, and the labels that stand beside some."""
    for names in msgspec.structs.astuple(metrics):
        for name in names:
            yield from (name,) if isinstance(name, str) else name


def scraped_queues(text: bytes, metrics: EngineMetrics) -> dict[int | None, tuple[int, int]]:
    """Running and waiting requests by rank, and for None those of all ranks."""
    counts: dict[int | None, list[float]] = {}
    try:
        for name, labels, value in _found(_QUEUE, text, (*metrics.running, *metrics.waiting)):
            for rank in {None, _rank_in(labels, metrics)}:
                counts.setdefault(rank, [0.0, 0.0])[name.decode() in metrics.waiting] += float(value)
    except ValueError:
        return {}
    return {
        rank: (int(running), int(waiting))
        for rank, (running, waiting) in counts.items()
        if 0 <= running <= MAX_REQUESTS and 0 <= waiting <= MAX_REQUESTS
    }


def scraped_steps(text: bytes, metrics: EngineMetrics) -> int:
    """A number that is another one after each step of the engine that did something."""
    lines: list[bytes] = []
    for name in map(str.encode, metrics.steps):  # an expression would take ten times as long, in the event loop
        at = text.find(name)
        while at >= 0 and len(lines) < MAX_STEPS:
            lines.append(text[at : at + LONGEST_LINE].partition(b"\n")[0])
            at = text.find(name, at + 1)
    return hash(tuple(lines))


def is_asleep(text: bytes, metrics: EngineMetrics) -> bool:
    """Return whether a rank has been put to sleep: it takes requests, and computes nothing."""
    return any(
        not float(awake)
        for name, label in metrics.awake
        for awake in _found(rf"^(?:%s)\{{[^}}\n]*{re.escape(label)}[^}}\n]*\}} ([0-9.]{{1,32}})$", text, (name,))
    )


def speculates(text: bytes, metrics: EngineMetrics) -> bool:
    return any(b"\n%b" % name.encode() in text for name in metrics.speculating)


def scraped_pools(text: bytes, metrics: EngineMetrics) -> dict[int | None, Pool]:
    """The caches by rank, and for None all of them together."""
    pools: dict[int | None, Pool] = {}
    for name, size, count in metrics.cache_infos:
        for labels in _found(_INFO, text, (name,)):
            block_tokens, blocks = (_figures(labels).get(label, 0) for label in (size, count))
            for rank in {None, _rank_in(labels, metrics)}:
                so_far = pools.get(rank, Pool(0, 0))
                pools[rank] = Pool(so_far.blocks + blocks, max(so_far.block_tokens, block_tokens))
    pools = pools or _paged(text, metrics)
    return {rank: pool for rank, pool in pools.items() if 0 < pool.blocks <= MAX_BLOCKS and pool.block_tokens}


def _paged(text: bytes, metrics: EngineMetrics) -> dict[int | None, Pool]:
    """The caches that an engine describes by two gauges; all processes of a rank describe the same one."""
    pools: dict[int | None, Pool] = {}
    for size, count in metrics.cache_gauges:
        figures: dict[int | None, dict[str, int]] = {}
        try:
            for name, labels, value in _found(_GAUGE, text, (size, count)):
                figures.setdefault(_rank_in(labels, metrics), {})[name.decode()] = int(float(value))
        except (ValueError, OverflowError):
            return {}
        pools |= {rank: Pool(found.get(count, 0), found.get(size, 0)) for rank, found in figures.items()}
    if pools:
        together = Pool(sum(pool.blocks for pool in pools.values()), max(pool.block_tokens for pool in pools.values()))
        pools[None] = together
    return pools


def _found(pattern: str, text: bytes, names: tuple[str, ...]) -> list[Any]:
    """Search from the first of these names on: the expression alone would take long, in the event loop."""
    starts = [at for name in names if (at := text.find(name.encode())) >= 0]
    return _compiled(pattern, names).findall(text, min(starts), min(starts) + MAX_SEARCHED_BYTES) if starts else []


@lru_cache(256)
def _compiled(pattern: str, names: tuple[str, ...]) -> re.Pattern[bytes]:
    return re.compile((pattern % "|".join(map(re.escape, names))).encode(), re.M)


def _rank_in(labels: bytes, metrics: EngineMetrics) -> int | None:
    figures = _figures(labels)
    return next((figures[label] for label in metrics.rank_labels if label in figures), None)


def _figures(labels: bytes) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in _FIGURE.findall(labels)}
