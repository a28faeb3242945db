"""A comparison as text, as JSON, and as a plot."""

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from lab.percentiles import percentile
from lab.plots import drawing
from lab.simulation.comparison import Outcome, Row
from lab.simulation.settings import Settings
from lab.trace.requests import Trace

HEAD = ("policy", "hits", "loaded", "TTFT mean", "p50", "p90", "p99", "session", "p99", "tokens", "requests", "busy")
LOADED = {HEAD.index("loaded")}  # not shown if nothing is
SESSIONS = {HEAD.index("session"), HEAD.index("session") + 1}  # not shown in an open loop, which gives a turn its time
SHARES = [place / 400 for place in range(401)]  # plotted
WIDTHS = (15, 8, 9, 11, 9, 9, 9, 10, 10, 9, 10, 7)


def lines(rows: Sequence[Row], *, closed_loop: bool = False) -> Iterator[str]:
    hidden = (set() if any(row.mean.brought_rate for row in rows) else LOADED) | (set() if closed_loop else SESSIONS)
    yield _joined(HEAD, hidden)
    bounds = [row for row in rows if row.is_bound]
    for row in rows:
        if bounds and row is bounds[0]:
            yield ""
        yield _joined((row.name, *_figures(row.mean, row.is_bound)), hidden)
    for row in rows:
        if row.mean.refused:
            yield f"{row.name}: {row.mean.refused:,.0f} requests waited for room in vain; they are in no other figure."
    if len(rows[0].runs) > 1:
        yield ""
        spreads = []  # of the mean TTFT between runs
        for row in rows:
            means = [one.ttft_mean_s for one in row.runs]
            if min(means) > 0:
                spreads.append((max(means) / min(means) - 1, row.name))
        yield f"Each figure is the mean of {len(rows[0].runs)} runs." + (
            f" The means of TTFT differ most for {max(spreads)[1]}: by {max(spreads)[0]:.1%}." if spreads else ""
        )


def _joined(cells: Sequence[str], hidden: Set[int]) -> str:
    columns = enumerate(zip(cells, WIDTHS, strict=True))
    _, *rest = (cell.rjust(width) for column, (cell, width) in columns if column not in hidden)
    return (cells[0].ljust(WIDTHS[0]) + "".join(rest)).rstrip()


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


def plot(path: Path, trace: Trace, settings: Settings, rows: Sequence[Row]) -> None:
    title = f"{trace.name}, {settings.replicas} replicas of {settings.capacity_tokens:,} tokens"
    with drawing(path, title=title, x="time to first token, s", y="share of requests") as axes:
        for row in rows:
            style = {"color": "grey", "linestyle": "--" if row.name == "pooled" else ":"} if row.is_bound else {}
            axes.plot(
                [percentile(row.ttft_s, share) for share in SHARES],
                SHARES,
                label=f"{row.name}, mean {duration(row.mean.ttft_mean_s)}",
                **style,
            )
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
