"""A result as text."""

from collections.abc import Iterator

from events.tool.words import number, printable, seconds
from lab.bench.figures import EndpointResult, Result
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
    if found.sessions:
        mean_s, p99_s = map(_seconds, (found.session_mean_s, found.session_p99_s))
        yield f"sessions  {found.sessions:,} complete, from arrival to last token {mean_s} in the mean, {p99_s} at p99"
    if found.sent_away:
        yield f"told to come again {found.sent_away:,} times; Retry-After came true {found.began_when_told:,} times"
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
