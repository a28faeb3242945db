"""`warmroute top --once`: prints the tables once, for pipes and scripts."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from router.console.formatting import plain_console
from router.top.columns import decision_table, event_table, prefix_table, replica_table
from router.top.heading import empty_text, heading
from router.top.poller import DECISIONS, PREFIXES, REPLICAS, Poller, RouterClient
from router.top.rows import branches_of, rows_of
from router.top.table import Segments, Table

MOST_PREFIXES, MOST_DECISIONS = 10, 10


async def once(router_url: str, admin_key: str | None, interval_s: float, file: TextIO) -> None:
    """Poll twice, for the rates in between, and print; raise ClickException if the router does not answer."""
    async with aclosing(RouterClient(router_url, admin_key)) as client:
        poller = Poller(client, interval_s)
        await poller.require()
        await asyncio.sleep(interval_s)
        await poller.require()
    draw(poller, plain_console(file))


def draw(poller: Poller, console: Console) -> None:
    rows = rows_of(poller)
    for line in heading(poller):
        console.print(line, soft_wrap=True)
    _table(console, replica_table(), rows, empty_text(poller, REPLICAS))
    if any(row.replica.events is not None for row in rows):
        _table(console, event_table(), rows, "")
    _table(console, prefix_table(), branches_of(poller), empty_text(poller, PREFIXES), MOST_PREFIXES)
    _table(console, decision_table(), poller.decisions, empty_text(poller, DECISIONS), MOST_DECISIONS)


def _table(console: Console, table: Table[Any], items: Sequence[Any], empty: str, most: int | None = None) -> None:
    table.show(items)
    console.print()
    if not items:
        console.print(Text(empty), soft_wrap=True)
        return
    console.print(_line(table.head(console.width), "dim"))
    for item in table.shown[:most]:
        console.print(_line(table.line(item, console.width)))


def _line(segments: Segments, style: str = "") -> Text:
    line = Text.assemble(*((text, own or style) for text, own in segments))
    line.rstrip()
    line.no_wrap, line.overflow = True, "crop"
    return line
