"""An analysis as text."""

from collections.abc import Iterator

from events.tool.words import printable
from lab.analysis.accesses import Sharing
from lab.analysis.analysis import HOST_SIZES, SHARES, Analysis, Breaks
from lab.writing import aligned

NEED_PROMPTS = "  A log that has them is written by: warmroute router --request-log FILE --log-prompts"


def lines(analysis: Analysis) -> Iterator[str]:
    yield from _sharing(analysis.name, analysis.sharing)
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


def _sharing(name: str, sharing: Sharing) -> Iterator[str]:
    saved = f"{sharing.saved_tokens:,} tokens = {sharing.hit_rate:.1%}, were nothing ever evicted"
    prefix = f"{sharing.shared_prefix_tokens:,.0f} tokens on the average"
    for title, value in (
        ("trace", name),
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
