"""A result as tables, and the progress of a run on terminals."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from events.tool.words import number, printable, seconds
from fleet.display import Display
from lab.bench.figures import Figures, Ratio
from lab.bench.load import LoadGenerator
from lab.bench.result import EndpointResult, Result
from lab.percentiles import percentile
from router.members.spec import Target

SHOW_EVERY_S = 0.5  # drawing takes time that the load generator needs


class Live(Display):
    """To be used as a context manager around `measured`, which is given `load`."""

    def __init__(self, rounds: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False)
        super().__init__("asking for the model", console, quiet=True, auto_refresh=False)
        self._rounds = rounds
        self._load: LoadGenerator | None = None

    def load(self, load: LoadGenerator, target: Target, number: int) -> None:
        if self.bar is None:
            return
        begins = self._load is None
        self._load = load
        title = target.url if self._rounds == 1 else f"round {number + 1} of {self._rounds}: {target.url}"
        self.begin(title, progress(load)[1])
        if begins:
            self._show(self.bar)

    def _show(self, bar: Progress) -> None:
        assert self._load is not None
        self.step(*progress(self._load), state(self._load))
        bar.refresh()
        asyncio.get_running_loop().call_later(SHOW_EVERY_S, self._show, bar)


def progress(load: LoadGenerator) -> tuple[int, int | None]:
    """Return how far a run is, and of what: in milliseconds if it has a time limit, else in requests."""
    for_s, left_s = load.limits.for_s, load.left_s
    if for_s is None:
        return load.done, load.limits.requests
    return 0 if left_s is None else round(1000 * (for_s - left_s)), round(1000 * for_s)


def state(load: LoadGenerator) -> str:
    total = f"/{load.limits.requests:,}" if load.limits.requests is not None else ""
    words = [f"{load.done:,}{total} done", f"{load.in_flight:,} in flight"]
    if (left_s := load.left_s) is not None:
        words.append(f"{ceil(left_s)} s left" if left_s else "waiting for the last answers")
    if load.ttfts_s:
        p50, p99 = (seconds(percentile(load.ttfts_s, share)) for share in (0.5, 0.99))
        words.append(f"TTFT {p50}, p99 {p99}")
    if load.errors:
        words.append(f"{load.errors:,} failed")
    return ", ".join(words)


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
        left = sum(endpoint.unfinished for endpoint in result.endpoints)
        requests = "1 request was" if left == 1 else f"{left:,} requests were"
        yield Text(f"Interrupted: {requests} given up", style="yellow")


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
    rate = "" if found.hit_rate is None else f", {found.hit_rate:.1%} of the input"
    cached = "not told" if found.cached_tokens is None else f"{found.cached_tokens:,} tokens{rate}"
    lines = [
        ("requests", f"{found.requests:,} in {seconds(found.span_s)}, {found.failed:,} failed{refused}{warm_up}"),
        ("rate", f"{number(found.requests_per_s)} requests/s"),
        ("input", _tokens(found.input_tokens, found.input_tokens_per_s, found.asked_tokens)),
        ("output", _tokens(found.output_tokens, found.output_tokens_per_s, None)),
        ("cached", cached),
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


def _plain(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place else "left", no_wrap=True)
    return table


def _latencies(found: Figures) -> Table:
    table = _plain("", "mean", "p50", "p90", "p95", "p99", "max")
    spreads = (("TTFT", found.ttft_s), ("ITL", found.itl_s), ("TPOT", found.tpot_s), ("e2e", found.e2e_s))
    for name, spread in spreads:
        values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
        table.add_row(name, *(UNKNOWN if value is None else seconds(value) for value in values))
    return table


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
