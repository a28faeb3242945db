"""One frame, printed: what `warmroute top` shows, for pipes and for who has no use for a live view."""

import asyncio
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from router.top.asking import Asking
from router.top.columns import decision_table, event_table, prefix_table, replica_table
from router.top.figures import branches_of, rows_of
from router.top.heading import heading, nothing_of
from router.top.must import must_look
from router.top.table import Segments, Table
from router.top.watch import DECISIONS, PREFIXES, REPLICAS, Watch

MOST_PREFIXES, MOST_DECISIONS = 10, 10


async def once(router_url: str, admin_key: str | None, interval_s: float, file: TextIO) -> None:
    """Two looks: rates are what happened between them. ClickException."""
    async with Asking(router_url, admin_key) as asking:
        watch = Watch(asking, interval_s)
        await must_look(watch)
        await asyncio.sleep(interval_s)
        await must_look(watch)
    draw(watch, Console(file=file, highlight=False, emoji=False, markup=False))


def draw(watch: Watch, console: Console) -> None:
    rows = rows_of(watch)
    for line in heading(watch):
        console.print(line, soft_wrap=True)
    _table(console, replica_table(), rows, nothing_of(watch, REPLICAS))
    if any(row.replica.events is not None for row in rows):
        _table(console, event_table(), rows, "")
    _table(console, prefix_table(), branches_of(watch), nothing_of(watch, PREFIXES), MOST_PREFIXES)
    _table(console, decision_table(), watch.decisions, nothing_of(watch, DECISIONS), MOST_DECISIONS)


def _table(console: Console, table: Table[Any], items: Sequence[Any], nothing: str, most: int | None = None) -> None:
    table.show(items)
    console.print()
    if not items:
        console.print(Text(nothing), soft_wrap=True)
        return
    console.print(_line(table.head(console.width), "dim"))
    for item in table.shown[:most]:
        console.print(_line(table.line(item, console.width)))


def _line(segments: Segments, style: str = "") -> Text:
    line = Text.assemble(*((text, own or style) for text, own in segments))
    line.rstrip()
    line.no_wrap, line.overflow = True, "crop"
    return line
