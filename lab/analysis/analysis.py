"""The whole analysis of a file, as one object."""

from msgspec import Struct

from lab.analysis.accesses import Coarser, Sharing, accesses_of, coarser, sharing_of
from lab.analysis.breaks.prompts import Finding, Read
from lab.analysis.breaks.search import search
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

    target: float  # the wanted share of the tokens that can hit
    exact: Cache
    headroom: float
    with_headroom: Cache


class Breaks(Struct, frozen=True):
    """`without_text`: token ids, which say nothing about the text."""

    requests: int
    without_body: int
    without_text: int
    findings: list[Finding]


class Analysis(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    sharing: Sharing
    needed: Needed
    curve: list[Cache]
    block_sizes: list[Coarser]
    at_capacity: Cache | None = None
    with_host: list[WithHost] = []  # behind that
    breaks: Breaks | None = None  # None: a trace, which has no text


class AnalysisOptions(Struct, frozen=True, kw_only=True):
    target: float = 0.9
    kv_bytes_per_token: int | None = None
    capacity_tokens: int | None = None
    prefill_tokens_per_s: float = 8000.0
    load_tokens_per_s: float = 100_000.0


def analysis_of(trace: Trace, read: Read | None, options: AnalysisOptions) -> Analysis:
    accesses = accesses_of(trace)
    curve, sharing = curve_of(accesses), sharing_of(accesses)
    blocks, size = curve.needed(options.target), trace.block_tokens
    headroom = _cache(curve, max(with_headroom(blocks), sharing.longest_blocks), options)
    needed = Needed(
        target=options.target, exact=_cache(curve, blocks, options), headroom=HEADROOM, with_headroom=headroom
    )
    at_capacity, with_host = None, []
    if options.capacity_tokens:
        at_capacity = _cache(curve, options.capacity_tokens // size, options)
        token_s = max(0.0, 1 / options.prefill_tokens_per_s - 1 / options.load_tokens_per_s)
        for times in HOST_SIZES:  # it keeps what the cache evicts: both find what one cache of their size would
            host_blocks = times * at_capacity.blocks
            hit_rate = curve.hit_rate(at_capacity.blocks + host_blocks)
            loaded_rate = hit_rate - at_capacity.hit_rate
            saved_s = loaded_rate * curve.input_tokens * token_s
            with_host.append(WithHost(host_blocks * size, hit_rate, loaded_rate, saved_s))
    breaks = None if read is None else Breaks(read.requests, read.without_body, read.without_text, search(read.prompts))
    return Analysis(
        name=trace.name,
        sharing=sharing,
        needed=needed,
        curve=[_cache(curve, curve.needed(share), options) for share in SHARES],
        block_sizes=list(coarser(accesses)),
        at_capacity=at_capacity,
        with_host=with_host,
        breaks=breaks,
    )


def _cache(curve: HitRateCurve, blocks: int, options: AnalysisOptions) -> Cache:
    tokens = blocks * curve.block_tokens
    per_token = options.kv_bytes_per_token
    gb = None if per_token is None else tokens * per_token / GIGABYTE
    return Cache(blocks, tokens, curve.hit_rate(blocks), curve.share(blocks), gb)
