"""The whole analysis of a file, as one object and as text."""

from collections.abc import Iterator

from msgspec import Struct

from events.tool.words import printable
from lab.analysis.accesses import Sharing, accesses_of, sharing_of
from lab.analysis.breaks.prompts import Finding, Read
from lab.analysis.breaks.search import search
from lab.analysis.curve import HEADROOM, HitRateCurve, curve_of, with_headroom
from lab.trace.requests import Trace, coarsened
from lab.writing import aligned
from replica.model.sizing import GIGABYTE

HOST_SIZES = (2, 5, 10)  # host memory, as a multiple of the cache before it
FACTORS = (1, 2, 4, 8, 16)  # block sizes, as a multiple of the trace's
SHARES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


class Cache(Struct, frozen=True, omit_defaults=True):
    """A cache size and its hits; `share` relative to an unlimited cache."""

    blocks: int
    tokens: int
    hit_rate: float
    share: float
    gb: float | None = None


class BlockSize(Struct, frozen=True):
    block_tokens: int
    hit_rate: float  # an unlimited cache would have it


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
    block_sizes: list[BlockSize]
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
    sizes = (coarsened(trace, factor) for factor in FACTORS)
    return Analysis(
        name=trace.name,
        sharing=sharing,
        needed=needed,
        curve=[_cache(curve, curve.needed(share), options) for share in SHARES],
        block_sizes=[BlockSize(each.block_tokens, sharing_of(accesses_of(each)).hit_rate) for each in sizes],
        at_capacity=at_capacity,
        with_host=with_host,
        breaks=breaks,
    )


def _cache(curve: HitRateCurve, blocks: int, options: AnalysisOptions) -> Cache:
    tokens = blocks * curve.block_tokens
    per_token = options.kv_bytes_per_token
    gb = None if per_token is None else tokens * per_token / GIGABYTE
    return Cache(blocks, tokens, curve.hit_rate(blocks), curve.share(blocks), gb)


# ---- as text

NEED_PROMPTS = "  A log that has them is written by: warmroute router --request-log FILE --log-prompts"


def lines(analysis: Analysis) -> Iterator[str]:
    sharing = analysis.sharing
    saved = f"{sharing.saved_tokens:,} tokens = {sharing.hit_rate:.1%}, were nothing ever evicted"
    prefix = f"{sharing.shared_prefix_tokens:,.0f} tokens on the average"
    for title, value in (
        ("trace", analysis.name),
        ("requests", f"{sharing.requests:,}"),
        ("input tokens", f"{sharing.input_tokens:,}"),
        ("blocks", f"{sharing.blocks:,}  full ones, of {sharing.block_tokens:,} tokens"),
        ("unique blocks", f"{sharing.unique_blocks:,}"),
        ("shared blocks", f"{sharing.shared_blocks:,}  in two requests or more"),
        ("reusable", f"{sharing.reusable_blocks:,}  every further use of a block"),
        ("could be saved", saved),
        ("shared prefix", f"{prefix}; {sharing.sharing_requests:,} requests have one"),
    ):
        yield f"{title:<16}{value}"
    yield ""
    yield from _caches(analysis)
    yield ""
    if analysis.with_host:
        rows = [("host memory behind it", "hit rate", "loaded", "tokens", "prefill saved")]
        for size, one in zip(HOST_SIZES, analysis.with_host, strict=True):
            figures = (f"{one.hit_rate:.1%}", f"{one.loaded_rate:.1%}", f"{one.host_tokens:,}", f"{one.saved_s:,.0f} s")
            rows.append((f"{size} times the cache", *figures))
        yield from aligned(rows)
        yield ""
    sizes = [(f"{each.block_tokens:,} tokens", f"{each.hit_rate:.1%}") for each in analysis.block_sizes]
    yield from aligned([("block size, if nothing is evicted", "hit rate"), *sizes])
    yield ""
    yield from _breaks(analysis.breaks)


def _caches(analysis: Analysis) -> Iterator[str]:
    needed, cache = analysis.needed, analysis.needed.with_headroom
    titles = ["all" if share == 1 else f"{share * 100:g} %" for share in SHARES]
    caches = {f"{title} of what can hit": one for title, one in zip(titles, analysis.curve, strict=True)}
    if analysis.at_capacity is not None:
        caches["--capacity-tokens"] = analysis.at_capacity
    rows = [("cache", "hit rate", "blocks", "tokens", *(["GB"] if cache.gb is not None else []))]
    for title, one in caches.items():
        gb = [f"{one.gb:,.2f}"] if one.gb is not None else []
        rows.append((title, f"{one.hit_rate:.1%}", f"{one.blocks:,}", f"{one.tokens:,}", *gb))
    yield from aligned(rows)
    limit = "; the longest prompt takes that much" if cache.blocks == analysis.sharing.longest_blocks else ""
    in_gb = "" if cache.gb is None else f" = {cache.gb:,.2f} GB"
    target = f"For {needed.target * 100:.4g} % of what can hit, with {needed.headroom * 100:.0f} % headroom"
    yield f"{target}: {cache.blocks:,} blocks = {cache.tokens:,} tokens{in_gb}{limit}"


def _breaks(breaks: Breaks | None) -> Iterator[str]:
    if breaks is None or breaks.without_body == breaks.requests:
        yield f"Faults: not searched for, as {'a trace has no text' if breaks is None else 'this log has no prompts'}"
        yield NEED_PROMPTS
        return
    yield "What breaks sharing" if breaks.findings else "What breaks sharing: nothing found"
    for count, why in ((breaks.without_body, "no body"), (breaks.without_text, "no text that can be read")):
        if count:
            yield f"  {count:,} of {breaks.requests:,} requests have {why}"
    for finding in breaks.findings:
        yield f"  {finding.name}: {finding.requests:,} requests, about {finding.lost_tokens:,} tokens lost"
        example, width = finding.example, max(map(len, finding.request_ids))
        for name, text in zip(finding.request_ids, (example.one, example.other), strict=True):
            yield f"    {name:<{width}}  ...{printable(example.before)}[{printable(text)}]"
        yield f"    {finding.advice}"
