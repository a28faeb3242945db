"""`warmroute events stat`: rates, churn, lifetimes, losses and the hottest prefixes of streams."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from events.analysis.statistics import Rates, Report
from events.analysis.tree import ancestors
from events.analysis.trunks import hottest_prefixes, longest_chains, token_ids
from events.tool.comparison import grid
from events.tool.options import (
    StreamOptions,
    for_option,
    json_option,
    open_targets,
    stream_options,
    tokenizer_option,
)
from events.tool.output import Output, count, plain
from events.tool.streams import Watch, follow, played
from events.tool.words import Decode, content, number, restrictions, seconds

REFRESH_S = 1.0
# A big tree takes its time to sum up: that should be a tenth of the command's time, not all of it.
REST_FACTOR = 10


@click.command()
@click.argument("targets", metavar="FILE|ENDPOINT...", nargs=-1, required=True)
@stream_options
@for_option
@click.option("--top", default=3, show_default=True, metavar="N", help="How many chains and hot prefixes to list.")
@tokenizer_option
@json_option
def stat(
    targets: tuple[str, ...],
    stream: StreamOptions,
    for_s: float | None,
    top: int,
    decode: Decode | None,
    as_json: bool,
) -> None:
    """Show rates, churn, lifetimes, losses and the hottest prefixes of a stream.

    Sum up each replica of a recording once; follow live streams and update every second, until Ctrl-C or for
    --for SECONDS. A lifetime is the age at which that share of the blocks is evicted; blocks that are still resident
    count as "at least this old" (Kaplan-Meier), neither as evicted nor as nothing. Lag is the time of receipt minus the
    batch's own time stamp. A hot prefix is a shared trunk: it has saved its length times the number of distinct
    continuations ever stored below it, less one.

    \b
    Examples:
      warmroute events stat incident.wre
      warmroute events stat tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:5558
      warmroute events stat tcp://10.0.0.7:5557 tcp://10.0.0.8:5557 --for 60 --json
    """
    output = Output(as_json)
    shown = Shown(output, top, decode)
    watched = [Watch(target, source) for target in open_targets(targets, stream) for source in target.sources]
    live = played(watched, output.note)
    if recorded := [watch for watch in watched if watch.target.recording is not None]:
        shown.show(recorded)
    if live:
        _follow(live, shown, for_s)


def _follow(live: Sequence[Watch], shown: "Shown", for_s: float | None) -> None:
    due_s = 0.0
    drawn = None if shown.output.json else Live(console=Console(highlight=False), auto_refresh=False)

    def refresh() -> None:
        nonlocal due_s
        started_s = time.monotonic()
        if started_s < due_s:
            return
        if drawn is None:
            shown.show(live, time.time())
        else:
            drawn.update(shown.drawing(live, time.time()), refresh=True)
        due_s = started_s + REST_FACTOR * (time.monotonic() - started_s)

    with drawn or nullcontext():
        follow(live, limit_s=for_s, every=refresh, every_s=REFRESH_S)
        due_s = 0.0
        refresh()


class Shown:
    """Reports on the screen, or as JSON lines."""

    def __init__(self, output: Output, top: int, decode: Decode | None) -> None:
        self.output = output
        self._top = top
        self._decode = decode

    def show(self, watched: Sequence[Watch], now_s: float | None = None) -> None:
        if self.output.json:
            for watch in watched:
                self.output.line(self._fields(watch, now_s))
        else:
            self.output.console.print(self.drawing(watched, now_s), soft_wrap=False)

    def drawing(self, watched: Sequence[Watch], now_s: float | None = None) -> Group:
        return Group(*(part for watch in watched for part in self._parts(watch, now_s)))

    def _fields(self, watch: Watch, now_s: float | None) -> dict[str, Any]:
        report = watch.statistics.report(watch.view, watch.tree, now_s)
        chains = longest_chains(watch.tree, self._top)
        hot = hottest_prefixes(watch.tree, self._top)
        return {
            **plain(report),
            "longest_chains": [{"key": f"{c.leaf.key:016x}", "blocks": c.blocks, "tokens": c.tokens} for c in chains],
            "hottest_prefixes": [
                {
                    "key": f"{prefix.run.last.key:016x}",
                    "prefix_tokens": prefix.prefix_tokens,
                    "trunk_tokens": prefix.run.tokens,
                    "trunk_token_ids": token_ids(prefix.run.packed),
                    "uses": prefix.uses,
                    "saved_tokens": prefix.saved_tokens,
                }
                for prefix in hot
            ],
        }

    def _parts(self, watch: Watch, now_s: float | None) -> list[Text | Table]:
        report = watch.statistics.report(watch.view, watch.tree, now_s)
        title = Text(report.replica, style="bold", no_wrap=True, overflow="ellipsis")
        exact = "exact" if report.inexact is None else f"inexact: {report.inexact}"
        title.append(f"  {exact}", style="green" if report.inexact is None else "yellow")
        table = grid()
        for name, text in [*_rows(report), *self._prefix_rows(watch)]:
            table.add_row(name, Text(text))
        return [title, table]

    def _prefix_rows(self, watch: Watch) -> list[tuple[str, str]]:
        rows = [
            (
                "long chain",
                f"{count(chain.tokens, 'token')} in {count(chain.blocks, 'block')}, ends {chain.leaf.key:016x}",
            )
            for chain in longest_chains(watch.tree, self._top)
        ]
        for prefix in hottest_prefixes(watch.tree, self._top):
            *_, top = ancestors(prefix.run.first)
            within = [f"{prefix.prefix_tokens:,} long", *(restrictions(top.namespace) if top.namespace else [])]
            text = content(prefix.run.packed, self._decode, prefix.run.extras)
            saved = f"saved {count(prefix.saved_tokens, 'token')} in {prefix.uses:,} uses"
            rows.append(("hot prefix", f"{saved}, {', '.join(within)}: {text}"))
        return rows


def _rows(report: Report) -> list[tuple[str, str]]:
    counts = report.counts
    resident = [
        f"{held.medium} {count(held.blocks, 'block')}, {count(held.tokens, 'token')}" for held in report.resident
    ]
    rows = [
        ("stream", f"{count(counts.batches, 'batch')}, last {report.last_seq}, in {seconds(report.span_s)}"),
        ("rate", _rates(report.rates)),
    ]
    if report.recent is not None:
        rows.append(("last 10 s", _rates(report.recent)))
    rows += [
        ("resident", "; ".join(resident) or "nothing"),
        ("stored", f"{count(counts.stored_blocks, 'block')}; {count(counts.removed_blocks, 'block')} removed"),
        ("churn", _churn(report)),
        *_lives(report),
        *_losses(report),
    ]
    if report.lag is not None:
        lag = report.lag
        rows.append(("lag", f"p50 {seconds(lag.p50_s)}, p99 {seconds(lag.p99_s)}, most {seconds(lag.most_s)}"))
        if lag.note:
            rows.append(("", lag.note))
    return rows


def _rates(rates: Rates) -> str:
    return (
        f"{number(rates.batches)} batches/s, {number(rates.events)} events/s; "
        f"blocks: {number(rates.stored_blocks)}/s stored, {number(rates.removed_blocks)}/s removed"
    )


def _churn(report: Report) -> str:
    held = sum(held.blocks for held in report.resident)
    share = f"{number(100 * report.rates.removed_blocks / held)} % of the cache per second" if held else "-"
    return f"{share}; {count(report.restored_blocks, 'block')} came back"


def _lives(report: Report) -> list[tuple[str, str]]:
    lives = report.lives
    known = f"{lives.evicted:,} evicted; {lives.censored:,} not, counted as censored"
    if not lives.evicted:
        return [("lifetime", known)]
    quantiles = ((10, lives.p10_s), (50, lives.p50_s), (90, lives.p90_s), (99, lives.p99_s))
    return [("lifetime", ", ".join(f"p{percent} {seconds(age)}" for percent, age in quantiles)), ("", known)]


def _losses(report: Report) -> list[tuple[str, str]]:
    stream, resolver = report.stream, report.resolver
    gaps = f"{count(stream.gaps, 'gap')} of {count(stream.missing_batches, 'batch')}"
    repairs = f"{count(stream.replays, 'replay')}, {count(stream.snapshots, 'snapshot')} asked"
    rows = [
        ("gaps", f"{gaps}, {stream.lost_batches:,} lost for good; {repairs}"),
        (
            "duplicates",
            f"{count(stream.duplicates, 'batch')}; {count(resolver.duplicate_blocks, 'block')} stored while resident",
        ),
        (
            "orphans",
            f"{count(report.orphans_waiting, 'block')} waiting; {count(resolver.orphans_resolved, 'event')} "
            f"named later, {resolver.orphans_dropped:,} dropped",
        ),
    ]
    if stream.restarts or stream.reconnects:
        rows.append(("restarts", f"{stream.restarts:,}; {count(stream.reconnects, 'reconnect')}"))
    odd = [
        (resolver.unpaired_blocks, "without matching tokens"),
        (resolver.removed_unknown, "removals of unknown blocks"),
        (resolver.unknown_events, "events of unknown type"),
        (resolver.rejected_events, "unreadable events"),
        (stream.digest_mismatches, "digests that differed"),
    ]
    if found := [f"{many:,} {what}" for many, what in odd if many]:
        rows.append(("not usable", ", ".join(found)))
    return rows
