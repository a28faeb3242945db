"""`warmroute events stat`: rates, churn and losses of streams."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import asdict
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from events.analysis.tree import place
from events.cache.changes import Change
from events.messages import BlockRemoved, BlockStored, EventBatch, Frames
from events.source import Source
from events.stream.actions import Action, Apply
from events.tool.options import StreamOptions, Target, for_option, json_option, open_targets, stream_options
from events.tool.output import Output, count, grid
from events.tool.streams import Stream, follow, played
from events.tool.words import number, seconds

REFRESH_S = 1.0
LAGS_KEPT = 20_000
CLOCK_SLACK_S = 0.5


@click.command()
@click.argument("targets", metavar="FILE|ENDPOINT...", nargs=-1, required=True)
@stream_options
@for_option
@json_option
def stat(targets: tuple[str, ...], stream: StreamOptions, for_s: float | None, as_json: bool) -> None:
    """Show rates, churn and losses of a stream.

    Sum up each replica of a recording once; follow live streams and update every second, until Ctrl-C or for
    --for SECONDS. Lag is the time of receipt minus the batch's own time stamp.

    \b
    Examples:
      warmroute events stat incident.wre
      warmroute events stat tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:5558
      warmroute events stat tcp://10.0.0.7:5557 tcp://10.0.0.8:5557 --for 60 --json
    """
    output = Output(as_json)
    counted = [Counted(target, source) for target in open_targets(targets, stream) for source in target.sources]
    live = played(counted, output.note)
    show(output, [each for each in counted if each not in live])
    if not live:
        return
    drawn = None if as_json else Live(console=Console(highlight=False), auto_refresh=False)

    def refresh() -> None:
        if drawn is None:
            show(output, live)
        else:
            drawn.update(Group(*(part for each in live for part in drawing(each.report()))), refresh=True)

    with drawn or nullcontext():
        follow(live, limit_s=for_s, every=refresh, every_s=REFRESH_S)
        refresh()


class Counts(Struct):
    batches: int = 0
    events: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0


class Counted(Stream):
    """Figures of a stream: counted as it goes by, put together on demand."""

    def __init__(self, target: Target, source: Source) -> None:
        super().__init__(target, source)
        self._counts = Counts()
        self._first_ts: float | None = None
        self._last_ts: float | None = None
        self._is_live = False  # the message that is acted on
        self._lags: deque[float] = deque(maxlen=LAGS_KEPT)  # only batches that were applied as they came have one
        self._least_lag_s = math.inf

    def received(self, kind: str, frames: Frames) -> None:  # noqa: ARG002
        self._is_live = kind == "events"

    def acted(self, action: Action, batch: EventBatch | None, changes: Sequence[Change]) -> None:  # noqa: ARG002
        if batch is not None and isinstance(action, Apply) and action.seq >= 0:
            counts, ts = self._counts, batch.ts
            counts.batches += 1
            counts.events += len(batch.events)
            for event in batch.events:
                if isinstance(event, BlockStored):
                    counts.stored_blocks += len(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    counts.removed_blocks += len(event.block_hashes)
            self._first_ts = min(ts, self._first_ts or ts)
            self._last_ts = max(ts, self._last_ts or ts)
            if self._is_live:
                self._lags.append(self.at_s - ts)
                self._least_lag_s = min(self._lags[-1], self._least_lag_s)

    def report(self) -> dict[str, Any]:
        """Return all figures, as JSON has them."""
        view, counts = self.view, asdict(self._counts)
        span_s = (self._last_ts or 0.0) - (self._first_ts or 0.0)
        lag: dict[str, Any] | None = None
        if lags := sorted(self._lags):
            least_s, note = self._least_lag_s, None
            if least_s < 0:
                note = f"clocks differ: a batch came {-least_s:.3g} s before it was sent"
            elif least_s > CLOCK_SLACK_S:
                note = f"never below {least_s:.3g} s: the clocks differ, or batches wait before they are sent"
            p50_s, p99_s = lags[len(lags) // 2], lags[int(len(lags) * 0.99)]
            lag = {"p50_s": p50_s, "p99_s": p99_s, "most_s": lags[-1], "least_s": least_s, "note": note}
        return {
            "replica": view.name,
            "inexact": view.inexact,
            "last_seq": view.stream.last_seq,
            "span_s": span_s,
            "counts": counts,
            "rates": {name: count / (span_s or math.inf) for name, count in counts.items()},
            "resident": [
                {"medium": place(pool.medium, pool.group), "blocks": len(pool)}
                for _, pool in sorted(view.resolver.pools.items())
                if len(pool)
            ],
            "lag": lag,
            "stream": asdict(view.stream.stats),
            "resolver": asdict(view.resolver.stats),
            "orphans_waiting": view.resolver.orphan_blocks,
        }


def show(output: Output, counted: Sequence[Counted]) -> None:
    for each in counted:
        if output.json:
            output.line(each.report())
            continue
        for part in drawing(each.report()):
            output.console.print(part, soft_wrap=False)


def drawing(report: dict[str, Any]) -> tuple[Text, Table]:
    title = Text(report["replica"], style="bold", no_wrap=True, overflow="ellipsis")
    inexact = report["inexact"]
    title.append("  exact" if inexact is None else f"  inexact: {inexact}", "green" if inexact is None else "yellow")
    table = grid()
    for name, text in _rows(report):
        table.add_row(name, Text(text))
    return title, table


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    counts, lag, stream, resolver = (report[of] for of in ("counts", "lag", "stream", "resolver"))
    rates = {name: number(rate) for name, rate in report["rates"].items()}
    held = sum(at["blocks"] for at in report["resident"])
    resident = [f"{at['medium']} {count(at['blocks'], 'block')}" for at in report["resident"]]
    removals_per_s, churn = report["rates"]["removed_blocks"], "-"
    if held and removals_per_s:
        lifetime = f"a block stays {seconds(held / removals_per_s)} on average"
        churn = f"{number(100 * removals_per_s / held)} % of the cache per second: {lifetime}"
    yield "stream", f"{count(counts['batches'], 'batch')}, last {report['last_seq']}, in {seconds(report['span_s'])}"
    messages = f"{rates['batches']} batches/s, {rates['events']} events/s"
    yield "rate", f"{messages}; blocks: {rates['stored_blocks']}/s stored, {rates['removed_blocks']}/s removed"
    yield "resident", "; ".join(resident) or "nothing"
    yield "stored", f"{count(counts['stored_blocks'], 'block')}; {count(counts['removed_blocks'], 'block')} removed"
    yield "churn", churn
    gaps = f"{count(stream['gaps'], 'gap')} of {count(stream['missing_batches'], 'batch')}"
    asked = f"{count(stream['replays'], 'replay')}, {count(stream['snapshots'], 'snapshot')} asked"
    yield "gaps", f"{gaps}, {stream['lost_batches']:,} lost for good; {asked}"
    again = f"{count(resolver['duplicate_blocks'], 'block')} stored while resident"
    yield "duplicates", f"{count(stream['duplicates'], 'batch')}; {again}"
    waiting = f"{count(report['orphans_waiting'], 'block')} waiting; {count(resolver['orphans_resolved'], 'event')}"
    yield "orphans", f"{waiting} named later, {resolver['orphans_dropped']:,} dropped"
    if stream["restarts"] or stream["reconnects"]:
        yield "restarts", f"{stream['restarts']:,}; {count(stream['reconnects'], 'reconnect')}"
    odd = {
        "without matching tokens": resolver["unpaired_blocks"],
        "removals of unknown blocks": resolver["removed_unknown"],
        "events of unknown type": resolver["unknown_events"],
        "unreadable events": resolver["rejected_events"],
        "digests that differed": stream["digest_mismatches"],
    }
    if any(odd.values()):
        yield "not usable", ", ".join(f"{many:,} {what}" for what, many in odd.items() if many)
    if lag is not None:
        yield "lag", f"p50 {seconds(lag['p50_s'])}, p99 {seconds(lag['p99_s'])}, most {seconds(lag['most_s'])}"
        if lag["note"]:
            yield "", lag["note"]
