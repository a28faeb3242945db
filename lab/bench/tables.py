"""Tables and plots of a result."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from events.tool.words import number, printable, seconds
from lab.bench.compare import Ratio
from lab.bench.figures import Figures
from lab.bench.outcome import Outcome
from lab.bench.result import EndpointResult, Result
from lab.percentiles import Spread
from lab.plots import drawing

UNKNOWN = "-"
WIDTH = 100
MOST_REASONS = 3  # why a replica is idle, with a line each


def show(result: Result, console: Console) -> None:
    for part in parts(result):
        console.print(part)


def parts(result: Result) -> Iterator[RenderableType]:
    for endpoint in result.endpoints:
        if endpoint.rounds:
            yield from _endpoint(endpoint)
            yield ""
    if result.comparison:
        yield Text(f"{result.endpoints[1].url} / {result.endpoints[0].url}", style="bold")
        yield _comparison(result.comparison)
        yield ""
    for warning in result.warnings:
        yield Text(f"Warning: {warning}", style="yellow")
    if result.interrupted:
        yield Text(f"Interrupted: {_unfinished(result.endpoints)} given up", style="yellow")


def _unfinished(endpoints: Iterable[EndpointResult]) -> str:
    count = sum(endpoint.unfinished for endpoint in endpoints)
    return "1 request was" if count == 1 else f"{count:,} requests were"


def _endpoint(endpoint: EndpointResult) -> Iterator[RenderableType]:
    found = endpoint.figures
    yield Text.assemble((endpoint.url, "bold"), f"  {endpoint.probe.model}")
    for name, value in _counts(found, endpoint):
        yield Text.assemble((f"{name:<10}", "dim"), value)
    if found.ttft_s.count:
        yield _latencies(found)
    for kind, count in found.errors.items():
        example = found.examples.get(kind, "")
        yield Text(f"  {count:,} x {kind}{f': {example}' if example else ''}", style="red")
    if found.replicas:
        yield _replicas(found, endpoint.idle)
    reasons = [(name, why) for name, why in endpoint.idle.items() if why is not None]
    for name, why in reasons[:MOST_REASONS]:
        yield Text.assemble((printable(name), "bold"), f" idle: {printable(why)}")
    if len(reasons) > MOST_REASONS:
        yield Text(f"{len(reasons) - MOST_REASONS} more are idle; warmroute top says why")


def _counts(found: Figures, endpoint: EndpointResult) -> list[tuple[str, str]]:
    warm_up = f", {found.warm_up:,} more to warm up" if found.warm_up else ""
    refused = f", {found.too_many:,} with status 429" if found.too_many else ""
    own = endpoint.own
    lines = [
        ("requests", f"{found.requests:,} in {seconds(found.span_s)}, {found.failed:,} failed{refused}{warm_up}"),
        ("rate", f"{number(found.requests_per_s)} requests/s"),
        ("input", _tokens(found.input_tokens, found.input_tokens_per_s, found.asked_tokens)),
        ("output", _tokens(found.output_tokens, found.output_tokens_per_s, None)),
        ("cached", _cached(found)),
    ]
    cpu_s = sum(one.cpu_s for one in own)
    each_s = cpu_s / max(1, found.requests + found.warm_up)
    late_s = max(one.lag_p99_s for one in own)
    share = max(one.cpu_share for one in own)
    lines.append(
        ("own cost", f"{seconds(each_s)} of CPU a request, {share:.0%} of a core; late by {seconds(late_s)} at p99")
    )
    return lines


def _tokens(count: int | None, per_s: float | None, asked: int | None) -> str:
    if count is None or per_s is None:
        return f"not told; {asked or 0:,} tokens planned"
    planned = "" if asked is None else f" ({asked:,} planned)"
    return f"{count:,} tokens{planned}, {number(per_s)}/s"


def _cached(found: Figures) -> str:
    if found.cached_tokens is None:
        return "not told"
    rate = "" if found.hit_rate is None else f", {found.hit_rate:.1%} of the input"
    return f"{found.cached_tokens:,} tokens{rate}"


def _plain(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place else "left", no_wrap=True)
    return table


def _latencies(found: Figures) -> Table:
    table = _plain("", "mean", "p50", "p90", "p95", "p99", "max")
    spreads = (("TTFT", found.ttft_s), ("ITL", found.itl_s), ("TPOT", found.tpot_s), ("e2e", found.e2e_s))
    for name, spread in spreads:
        table.add_row(name, *_cells(spread))
    return table


def _cells(spread: Spread) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
    return [UNKNOWN if value is None else seconds(value) for value in values]


def _replicas(found: Figures, idle: Iterable[str]) -> Table:
    table = _plain("replica", "requests", "share", "cached", "TTFT p50", "p99")
    for name, own in found.replicas.items():
        hits = UNKNOWN if own.hit_rate is None else f"{own.hit_rate:.1%}"
        table.add_row(
            Text(name), f"{own.requests:,}", f"{own.share:.1%}", hits, seconds(own.ttft_s.p50), seconds(own.ttft_s.p99)
        )
    for name in idle:
        table.add_row(Text(printable(name)), "0", "0.0%", *[UNKNOWN] * 3)
    return table


def _comparison(ratios: Sequence[Ratio]) -> Table:
    table = _plain("", "first", "second", "ratio", "95 % interval")
    for ratio in ratios:
        if ratio.ratio is None:
            continue
        interval = UNKNOWN if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
        style = "bold" if ratio.is_sure else ""
        table.add_row(
            ratio.name,
            _value(ratio.name, ratio.first),
            _value(ratio.name, ratio.second),
            Text(f"{ratio.ratio:.3f}", style=style),
            interval,
        )
    return table


def _value(name: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if name == "hit rate":
        return f"{value:.1%}"
    return number(value) if name.endswith("/s") else seconds(value)


FEW = 2000  # points above this are drawn smaller


def draw(path: Path, title: str, names: Sequence[str], outcomes: Sequence[tuple[int, int, Outcome]]) -> None:
    """On the left the share of requests by time to first token, on the right each one when it was due."""
    with drawing(path, title=title, x="TTFT, s", y="share of requests") as left:
        sides = left.figure.add_gridspec(1, 2)
        left.set_subplotspec(sides[0])
        right = left.figure.add_subplot(sides[1], xlabel="due after, s", ylabel="TTFT, s")
        right.grid(alpha=0.3)
        right.spines[["top", "right"]].set_visible(False)
        for number, name in enumerate(names):
            own = [one for which, _, one in outcomes if which == number and not one.is_warm_up]
            points = [(one.intended_s, one.ttft_s) for one in own if one.ttft_s is not None]
            ttfts_s = sorted(ttft_s for _, ttft_s in points)
            shares = [(place + 1) / len(ttfts_s) for place in range(len(ttfts_s))]
            left.plot(ttfts_s, shares, drawstyle="steps-post", label=name, color=f"C{number}")
            size = 6 if len(points) <= FEW else 1
            right.scatter([at_s for at_s, _ in points], [ttft_s for _, ttft_s in points], s=size, color=f"C{number}")
        left.set_ylim(0, 1.02)
        right.set_ylim(bottom=0)
