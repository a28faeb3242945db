"""Draws the response of GET /usage as a table."""

from collections.abc import Mapping
from typing import TextIO

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from router.asking import Client
from router.formatting import decoded, plain_console
from router.tenants.usage import Counts

COLUMNS = ("requests", "errors", "computed", "cached", "generated", "mean TTFT", "saved")


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
    found, console = decoded(answer, Answer), plain_console(file, width)
    if found.usage:
        console.print(_table(found.usage))
    else:
        console.print(Text("Nothing was used."))
    if found.kept_in == "memory":
        console.print(Text(f"Kept in memory since the router's start, {found.since}; --usage-db keeps it in a file."))
    if found.problem is not None:
        console.print(Text(f"The file fails: {found.problem}"))


def _table(lines: list[Line]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("day", "key", "model"):
        table.add_column(name)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(line.day, Text(line.key), Text(line.model), *_cells(line))
    if len(lines) > 1:
        whole = Counts()
        for line in lines:
            whole.add(line)
        table.add_row("all", "", "", *_cells(whole))
    return table


def _cells(counts: Counts) -> list[str]:
    errors = counts.client_errors + counts.server_errors
    tokens = counts.computed_tokens, counts.cached_tokens, counts.generated_tokens
    ttft = f"{counts.first_token_s / counts.first_tokens:.3f} s" if counts.first_tokens else "-"
    saved = f"{counts.saved_s:,.1f} s"
    return [f"{counts.requests:,}", f"{errors:,}", *(f"{count:,}" for count in tokens), ttft, saved]
