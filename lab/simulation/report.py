"""A comparison as text and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import asdict

from lab.simulation.comparison import Outcome, Row
from lab.simulation.settings import Settings
from lab.trace.requests import Trace
from lab.writing import aligned

HEAD = ("policy", "hits", "loaded", "TTFT mean", "p50", "p90", "p99", "session", "p99", "tokens", "requests", "busy")
LOADED = {HEAD.index("loaded")}  # not shown if nothing is
SESSIONS = {HEAD.index("session"), HEAD.index("session") + 1}  # not shown in an open loop, which gives a turn its time


def lines(trace: Trace, settings: Settings, rows: Sequence[Row]) -> Iterator[str]:
    yield from _inputs(trace, settings)
    yield ""
    hides_loaded, hides_sessions = not any(row.mean.brought_rate for row in rows), not settings.closed_loop
    hidden = {at for at in LOADED if hides_loaded} | {at for at in SESSIONS if hides_sessions}
    policies, bounds = ([row for row in rows if row.is_bound is is_bound] for is_bound in (False, True))
    table: list[Sequence[str]] = [HEAD, *((row.name, *_figures(row.mean, row.is_bound)) for row in policies)]
    if bounds:
        table += [(), *((row.name, *_figures(row.mean, row.is_bound)) for row in bounds)]
    yield from aligned([cell for at, cell in enumerate(row) if at not in hidden] for row in table)
    for row in rows:
        if row.mean.refused:
            yield f"{row.name}: {row.mean.refused:,.0f} requests waited for room in vain; they are in no other figure."
    if len(rows[0].runs) > 1:
        means = {row.name: [one.ttft_mean_s for one in row.runs] for row in rows}
        spreads = [(max(own) / min(own) - 1, name) for name, own in means.items() if min(own) > 0]
        yield ""
        yield f"Each figure is the mean of {len(rows[0].runs)} runs." + (
            f" The means of TTFT differ most for {max(spreads)[1]}: by {max(spreads)[0]:.1%}." if spreads else ""
        )


def _inputs(trace: Trace, settings: Settings) -> Iterator[str]:
    rate = settings.prefill_tokens_per_s
    asked = trace.input_tokens / trace.span_s if trace.span_s else float("inf")
    below = "".join(
        f", {tokens:,} of {name} at {speed:,.0f} tokens/s"
        for tokens, name, speed in (
            (settings.host_tokens, "host memory", settings.load_tokens_per_s),
            (settings.disk_tokens, "disk", settings.disk_tokens_per_s),
        )
        if tokens
    )
    if settings.pull_tokens_per_s:
        below += f", read by others at {settings.pull_tokens_per_s:,.0f} tokens/s"
    roles = f", {settings.prefill_replicas} for prompts alone" if settings.prefill_replicas else ""
    yield (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.input_tokens:,} input tokens in blocks of "
        f"{trace.block_tokens:,}, within {trace.span_s:,.0f} s"
    )
    yield (
        f"{settings.replicas} replicas ({settings.model}{roles}), each {settings.capacity_tokens:,} tokens of cache"
        f"{below} and {rate:,.0f} prefill tokens/s: load {asked / (settings.replicas * rate):.2f}"
    )


def _figures(one: Outcome, is_bound: bool) -> Iterator[str]:
    yield f"{one.hit_rate:.1%}"
    yield f"{one.brought_rate:.1%}"
    for seconds in (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s):
        yield duration(seconds)
    for session_s in (one.session_mean_s, one.session_p99_s):
        yield "" if session_s is None else f"{session_s:,.0f} s"
    yield "" if is_bound else f"{one.token_imbalance:.2f}"
    yield "" if is_bound else f"{one.request_imbalance:.2f}"
    yield f"{one.utilization:.0%}"


def duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 0.1 else f"{seconds * 1000:,.0f} ms"


def as_json(trace: Trace, settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace.requests),
            "input_tokens": trace.input_tokens,
            "block_tokens": trace.block_tokens,
            "span_s": trace.span_s,
        },
        "settings": asdict(settings),
        "policies": {row.name: _of_row(row) for row in rows if not row.is_bound},
        "bounds": {row.name: _of_row(row) for row in rows if row.is_bound},
    }


def _of_row(row: Row) -> dict[str, Any]:
    return {**asdict(row.mean), "runs": [asdict(one) for one in row.runs]}
