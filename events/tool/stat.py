"""`warmroute events stat`: rates, churn, losses and the hottest prefixes of streams."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from events.analysis.tree import ancestors, hottest_prefixes, token_ids
from events.tool.options import (
    StreamOptions,
    for_option,
    json_option,
    open_targets,
    stream_options,
    tokenizer_option,
)
from events.tool.output import Output, count, grid
from events.tool.streams import Watch, follow, played
from events.tool.words import Decode, content, number, restrictions, seconds

REFRESH_S = 1.0
# A big tree takes its time to sum up: that should be a tenth of the command's time, not all of it.
REST_FACTOR = 10


@click.command()
@click.argument("targets", metavar="FILE|ENDPOINT...", nargs=-1, required=True)
@stream_options
@for_option
@click.option("--top", default=3, show_default=True, metavar="N", help="How many hot prefixes to list.")
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
    """Show rates, churn, losses and the hottest prefixes of a stream.

    Sum up each replica of a recording once; follow live streams and update every second, until Ctrl-C or for
    --for SECONDS. Lag is the time of receipt minus the batch's own time stamp. A hot prefix is a shared trunk: it has
    saved its length times the number of distinct continuations ever stored below it, less one.

    \b
    Examples:
      warmroute events stat incident.wre
      warmroute events stat tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:5558
      warmroute events stat tcp://10.0.0.7:5557 tcp://10.0.0.8:5557 --for 60 --json
    """
    output = Output(as_json)
    watched = [Watch(target, source) for target in open_targets(targets, stream) for source in target.sources]
    live = played(watched, output.note)
    if recorded := [watch for watch in watched if watch.target.recording is not None]:
        show(output, recorded, top, decode)
    if not live:
        return
    drawn = None if as_json else Live(console=Console(highlight=False), auto_refresh=False)
    due_s = 0.0

    def refresh() -> None:
        nonlocal due_s
        started_s = time.monotonic()
        if started_s < due_s:
            return
        if drawn is None:
            show(output, live, top, decode)
        else:
            drawn.update(Group(*(part for watch in live for part in drawing(watch, top, decode))), refresh=True)
        due_s = started_s + REST_FACTOR * (time.monotonic() - started_s)

    with drawn or nullcontext():
        follow(live, limit_s=for_s, every=refresh, every_s=REFRESH_S)
        due_s = 0.0
        refresh()


def show(output: Output, watched: Sequence[Watch], top: int, decode: Decode | None) -> None:
    for watch in watched:
        if not output.json:
            for part in drawing(watch, top, decode):
                output.console.print(part, soft_wrap=False)
            continue
        hot = [
            {
                "key": f"{prefix.run.last.key:016x}",
                "prefix_tokens": prefix.prefix_tokens,
                "trunk_tokens": prefix.run.tokens,
                "trunk_token_ids": token_ids(prefix.run.packed),
                "uses": prefix.uses,
                "saved_tokens": prefix.saved_tokens,
            }
            for prefix in hottest_prefixes(watch.tree, top)
        ]
        output.line({**watch.statistics.report(watch.view, watch.tree), "hottest_prefixes": hot})


def drawing(watch: Watch, top: int, decode: Decode | None) -> tuple[Text, Table]:
    report = watch.statistics.report(watch.view, watch.tree)
    title = Text(watch.view.name, style="bold", no_wrap=True, overflow="ellipsis")
    inexact = report["inexact"]
    title.append("  exact" if inexact is None else f"  inexact: {inexact}", "green" if inexact is None else "yellow")
    table = grid()
    for name, text in _rows(report):
        table.add_row(name, Text(text))
    for prefix in hottest_prefixes(watch.tree, top):
        *_, root = ancestors(prefix.run.first)
        within = [f"{prefix.prefix_tokens:,} long", *(restrictions(root.namespace) if root.namespace else [])]
        text = content(prefix.run.packed, decode, prefix.run.extras)
        saved = f"saved {count(prefix.saved_tokens, 'token')} in {prefix.uses:,} uses"
        table.add_row("hot prefix", Text(f"{saved}, {', '.join(within)}: {text}"))
    return title, table


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    counts, lag, stream, resolver = (report[of] for of in ("counts", "lag", "stream", "resolver"))
    rates = {name: number(rate) for name, rate in report["rates"].items()}
    held = sum(at["blocks"] for at in report["resident"])
    resident = [
        f"{at['medium']} {count(at['blocks'], 'block')}, {count(at['tokens'], 'token')}" for at in report["resident"]
    ]
    removals_per_s, churn = report["rates"]["removed_blocks"], "-"
    if held and removals_per_s:
        lifetime = f"a block stays {seconds(held / removals_per_s)} on average"
        churn = f"{number(100 * removals_per_s / held)} % of the cache per second: {lifetime}"
    yield "stream", f"{count(counts['batches'], 'batch')}, last {report['last_seq']}, in {seconds(report['span_s'])}"
    messages = f"{rates['batches']} batches/s, {rates['events']} events/s"
    yield "rate", f"{messages}; blocks: {rates['stored_blocks']}/s stored, {rates['removed_blocks']}/s removed"
    yield "resident", "; ".join(resident) or "nothing"
    yield "stored", f"{count(counts['stored_blocks'], 'block')}; {count(counts['removed_blocks'], 'block')} removed"
    yield "churn", f"{churn}; {count(report['restored_blocks'], 'block')} came back"
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
