"""`warmroute top --once`: prints the tables once, for pipes and scripts."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from router.console.formatting import plain_console
from router.console.top import tables
from router.console.top.heading import empty_text, heading
from router.console.top.poller import DECISIONS, PREFIXES, REPLICAS, Poller, RouterClient
from router.console.top.table import Segments, Table

MOST = 10  # prefixes, and decisions


async def once(router_url: str, admin_key: str | None, interval_s: float, file: TextIO) -> None:
    """Poll twice, for the rates in between, and print; raise ClickException if the router does not answer."""
    async with aclosing(RouterClient(router_url, admin_key)) as client:
        poller = Poller(client, interval_s)
        await poller.require()
        await asyncio.sleep(interval_s)
        await poller.require()
    draw(poller, plain_console(file))


def draw(poller: Poller, console: Console) -> None:
    rows = tables.rows_of(poller)
    for line in heading(poller):
        console.print(line, soft_wrap=True)
    _draw(console, tables.replica_table(), rows, empty_text(poller, REPLICAS))
    if any(row.replica.events is not None for row in rows):
        _draw(console, tables.event_table(), rows, "")
    _draw(console, tables.prefix_table(), tables.branches_of(poller), empty_text(poller, PREFIXES), MOST)
    _draw(console, tables.decision_table(), poller.decisions, empty_text(poller, DECISIONS), MOST)


def _draw(console: Console, table: Table[Any], items: Sequence[Any], empty: str, most: int | None = None) -> None:
    table.show(items)
    console.print()
    if not items:
        console.print(Text(empty), soft_wrap=True)
        return
    lines: list[Segments] = [[(text, style or "dim") for text, style in table.head(console.width)]]
    for segments in lines + [table.line(item, console.width) for item in table.shown[:most]]:
        line = Text.assemble(*segments, no_wrap=True, overflow="crop")
        line.rstrip()
        console.print(line)
