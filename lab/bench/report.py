"""A result as text, and the progress of a run on a terminal."""

import asyncio
from collections.abc import Iterator
from math import ceil

from rich.console import Console
from rich.progress import Progress

from events.tool.words import number, printable, seconds
from fleet.display import Display
from lab.bench.figures import EndpointResult, Result
from lab.bench.load import LoadGenerator
from lab.percentiles import percentile
from lab.writing import UNKNOWN, aligned


def lines(result: Result) -> Iterator[str]:
    [endpoint] = result.endpoints
    yield from _endpoint(endpoint)
    yield ""
    for warning in result.warnings:
        yield f"Warning: {warning}"
    if result.interrupted:
        left = endpoint.unfinished
        yield f"Interrupted: {'1 request was' if left == 1 else f'{left:,} requests were'} given up"


def _endpoint(endpoint: EndpointResult) -> Iterator[str]:
    found, [own] = endpoint.figures, endpoint.own
    yield f"{endpoint.url}  {printable(endpoint.probe.model)}"
    warm_up = f", {found.warm_up:,} more to warm up" if found.warm_up else ""
    refused = f", {found.too_many:,} with status 429" if found.too_many else ""
    rate = "" if found.hit_rate is None else f", {found.hit_rate:.1%} of the input"
    each_s = own.cpu_s / max(1, found.requests + found.warm_up)
    yield f"requests  {found.requests:,} in {seconds(found.span_s)}, {found.failed:,} failed{refused}{warm_up}"
    yield f"rate      {number(found.requests_per_s)} requests/s"
    if found.input_tokens is None or found.input_tokens_per_s is None:
        yield f"input     not told; {found.asked_tokens:,} tokens planned"
    else:
        planned = f"({found.asked_tokens:,} planned)"
        yield f"input     {found.input_tokens:,} tokens {planned}, {number(found.input_tokens_per_s)}/s"
    yield f"output    {found.output_tokens:,} tokens, {number(found.output_tokens_per_s)}/s"
    yield f"cached    {'not told' if found.cached_tokens is None else f'{found.cached_tokens:,} tokens{rate}'}"
    cost = f"{seconds(each_s)} of CPU a request, {own.cpu_share:.0%} of a core"
    yield f"own cost  {cost}; late by {seconds(own.lag_p99_s)} at p99"
    if found.ttft_s.count:
        spreads = {"TTFT": found.ttft_s, "ITL": found.itl_s, "TPOT": found.tpot_s, "e2e": found.e2e_s}
        names = ("mean", "p50", "p90", "p95", "p99", "max")
        rows = [(name, *(_seconds(getattr(one, field)) for field in names)) for name, one in spreads.items()]
        yield from aligned([("", *names), *rows])
    for kind, count in found.errors.items():
        example = found.examples.get(kind, "")
        yield f"  {count:,} x {kind}{f': {printable(example)}' if example else ''}"
    if found.replicas:
        table = [("replica", "requests", "share", "cached", "TTFT p50", "p99")]
        for name, one in found.replicas.items():
            hits = UNKNOWN if one.hit_rate is None else f"{one.hit_rate:.1%}"
            times = (_seconds(one.ttft_s.p50), _seconds(one.ttft_s.p99))
            table.append((printable(name), f"{one.requests:,}", f"{one.share:.1%}", hits, *times))
        yield from aligned(table)


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else seconds(value)


# ---- progress

SHOW_EVERY_S = 0.5  # drawing takes time that the load generator needs


class Live(Display):
    """To be used as a context manager around `measured`, which is given `load`."""

    def __init__(self, url: str, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False)
        super().__init__("asking for the model", console, quiet=True, auto_refresh=False)
        self._url = url
        self._load: LoadGenerator | None = None

    def load(self, load: LoadGenerator) -> None:
        if self.bar is not None:
            self._load = load
            self.begin(self._url, progress(load)[1])
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
