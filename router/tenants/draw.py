"""Draws the response of GET /usage as a table."""

from collections.abc import Mapping
from typing import TextIO

from msgspec import Struct
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from router.asking import Client
from router.formatting import decoded, duration, table_console
from router.tenants.usage import Counts

COLUMNS = ("day", "key", "model", "requests", "errors", "computed", "cached", "generated", "TTFT", "saved")
NAMED = 3  # of these, which tell one line from another
DISPENSABLE = ("errors", "TTFT", "saved", "computed")  # the first of them go first where not all columns fit


class Line(Counts):
    day: str = ""
    key: str = ""
    model: str = ""


class Answer(Struct):
    usage: list[Line]
    kept_in: str
    since: str | None = None
    problem: str | None = None


def ask(router_url: str, wanted: Mapping[str, str], key: str | None) -> bytes:
    with Client(router_url, key) as client:
        return client.ask("GET", "/usage", parameters=wanted)


def draw(answer: bytes, file: TextIO, width: int | None = None) -> None:
    found, console = decoded(answer, Answer), table_console(file, width)
    if found.usage:
        console.print(_fitting(found.usage, console))
    else:
        console.print(Text("Nothing was used."))
    if found.kept_in == "memory":
        console.print(Text(f"Kept in memory since the router's start, {found.since}; --usage-db keeps it in a file."))
    if found.problem is not None:
        console.print(Text(f"The file fails: {found.problem}"))


def _fitting(lines: list[Line], console: Console) -> Table:
    """The table, without the columns that there is no room for."""
    unlimited = console.options.update(width=10_000)
    for dropped in range(len(DISPENSABLE) + 1):
        table = _table(lines, [title for title in COLUMNS if title not in DISPENSABLE[:dropped]])
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
    return table


def _table(lines: list[Line], titles: list[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in COLUMNS[:NAMED] else "right", no_wrap=True)
    whole = Counts()
    for line in lines:
        whole.add(line)
    rows = [[line.day, line.key, line.model, *_cells(line)] for line in lines]
    if len(lines) > 1:
        rows.append(["all", "", "", *_cells(whole)])
    for row in rows:
        table.add_row(*(Text(cell) for title, cell in zip(COLUMNS, row, strict=True) if title in titles))
    return table


def _cells(counts: Counts) -> list[str]:
    errors = counts.client_errors + counts.server_errors
    tokens = counts.computed_tokens, counts.cached_tokens, counts.generated_tokens
    ttft = duration(counts.first_token_s / counts.first_tokens if counts.first_tokens else None)
    saved = f"{counts.saved_s:,.1f} s"
    return [f"{counts.requests:,}", f"{errors:,}", *(f"{count:,}" for count in tokens), ttft, saved]
