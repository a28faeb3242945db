"""The whole analysis of a file, as one object."""

import numpy as np
from msgspec import Struct

from lab.analysis.accesses import Accesses, Coarser, Integers, Sharing, accesses_of, coarser, sharing_of
from lab.analysis.breaks.prompts import Read
from lab.analysis.breaks.search import search
from lab.analysis.breaks.texts import Finding
from lab.analysis.curve import HEADROOM, HitRateCurve, curve_of, with_headroom
from lab.trace.requests import Trace
from replica.model.sizing import GIGABYTE

HOST_SIZES = (2, 5, 10)  # host memory, as a multiple of the cache before it
SHARES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


class Cache(Struct, frozen=True, omit_defaults=True):
    """A cache size and its hits; `share` relative to an unlimited cache."""

    blocks: int
    tokens: int
    hit_rate: float
    share: float
    gb: float | None = None


class WithHost(Struct, frozen=True):
    """Hits with host memory behind a cache: `loaded_rate` of all prompt tokens come from there."""

    host_tokens: int
    hit_rate: float
    loaded_rate: float
    saved_s: float  # prefill time, less that of loading


class Needed(Struct, frozen=True, kw_only=True):
    """The cache for a target hit rate; with headroom, at least as large as the longest prompt."""

    target: float  # of what can hit
    exact: Cache
    headroom: float
    with_headroom: Cache


class Breaks(Struct, frozen=True):
    """`without_text`: token ids, which say nothing about the text."""

    requests: int
    without_body: int
    without_text: int
    findings: list[Finding]


class Ordered(Struct, frozen=True):
    """The given and the suggested order, with a cache of this many tokens."""

    capacity_tokens: int
    hit_rate: float
    suggested_hit_rate: float
    suggested_best_tokens: int  # with these it reaches what a cache without an end gives


class Analysis(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    sharing: Sharing
    needed: Needed
    curve: list[Cache]
    block_sizes: list[Coarser]
    at_capacity: Cache | None = None
    with_host: list[WithHost] = []  # behind that
    breaks: Breaks | None = None  # None: a trace, which has no text
    order: Ordered | None = None


class AnalysisOptions(Struct, frozen=True, kw_only=True):
    target: float = 0.9
    kv_bytes_per_token: int | None = None
    capacity_tokens: int | None = None
    prefill_tokens_per_s: float = 8000.0
    load_tokens_per_s: float = 100_000.0
    ordered: bool = False


class AnalysisResult(Struct, frozen=True, eq=False):
    """An analysis, with the data for its plot and its order."""

    analysis: Analysis
    curve: HitRateCurve
    order: Integers | None


def analysis_of(trace: Trace, read: Read | None, options: AnalysisOptions) -> AnalysisResult:
    accesses = accesses_of(trace)
    curve = curve_of(accesses)
    order = depth_first(accesses) if options.ordered or options.capacity_tokens else None
    sharing = sharing_of(accesses)
    blocks = curve.needed(options.target)
    needed = Needed(
        target=options.target,
        exact=_cache(curve, blocks, options),
        headroom=HEADROOM,
        with_headroom=_cache(curve, max(with_headroom(blocks), sharing.longest_blocks), options),
    )
    capacity_tokens = options.capacity_tokens or needed.with_headroom.tokens
    at_capacity = _cache(curve, capacity_tokens // trace.block_tokens, options) if options.capacity_tokens else None
    breaks = None if read is None else Breaks(read.requests, read.without_body, read.without_text, search(read.prompts))
    analysis = Analysis(
        name=trace.name,
        sharing=sharing,
        needed=needed,
        curve=[_cache(curve, curve.needed(share), options) for share in SHARES],
        block_sizes=list(coarser(accesses)),
        at_capacity=at_capacity,
        with_host=[] if at_capacity is None else [_with_host(curve, at_capacity, size, options) for size in HOST_SIZES],
        breaks=breaks,
        order=None if order is None else _ordered(accesses, order, curve, capacity_tokens),
    )
    return AnalysisResult(analysis, curve, order)


def _cache(curve: HitRateCurve, blocks: int, options: AnalysisOptions) -> Cache:
    tokens = blocks * curve.block_tokens
    per_token = options.kv_bytes_per_token
    gb = None if per_token is None else tokens * per_token / GIGABYTE
    return Cache(blocks, tokens, curve.hit_rate(blocks), curve.share(blocks), gb)


def _with_host(curve: HitRateCurve, cache: Cache, size: int, options: AnalysisOptions) -> WithHost:
    """Host memory keeps what the cache evicts, so both together find what one cache of their size would."""
    host_blocks = size * cache.blocks
    hit_rate = curve.hit_rate(cache.blocks + host_blocks)
    loaded_rate = hit_rate - cache.hit_rate
    token_s = 1 / options.prefill_tokens_per_s - 1 / options.load_tokens_per_s
    saved_s = loaded_rate * curve.input_tokens * max(0.0, token_s)
    return WithHost(host_blocks * curve.block_tokens, hit_rate, loaded_rate, saved_s)


def _ordered(accesses: Accesses, order: Integers, curve: HitRateCurve, capacity_tokens: int) -> Ordered:
    suggested = curve_of(accesses.reordered(order))
    blocks = capacity_tokens // accesses.block_tokens
    best_tokens = suggested.needed(1.0) * accesses.block_tokens
    return Ordered(capacity_tokens, curve.hit_rate(blocks), suggested.hit_rate(blocks), best_tokens)


def depth_first(accesses: Accesses) -> Integers:
    """Places of the requests: through the tree of prefixes depth first, its branches in order of appearance.

    Numbers are given at first appearance, so sorting by them does that; equal prompts keep their order.
    """
    packed = memoryview(accesses.numbers.astype(">u4").tobytes())
    ends = (accesses.ends * 4).tolist()
    starts = [0, *ends[:-1]]
    keys = [bytes(packed[start:end]) for start, end in zip(starts, ends, strict=True)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
