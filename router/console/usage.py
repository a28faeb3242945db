"""Draws the response of GET /usage as a table."""

from collections.abc import Callable, Mapping
from typing import TextIO

from msgspec import Struct
from rich.text import Text

from router.console.asking import Client
from router.console.formatting import Column, decoded, duration, table_console, table_of
from router.tenants.usage import Counts


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
        whole = Line(day="all")
        for line in found.usage:
            whole.add(line)
        lines = [*found.usage, whole] if len(found.usage) > 1 else found.usage
        console.print(table_of(COLUMNS, lines, console.width))
    else:
        console.print(Text("Nothing was used."))
    if found.kept_in == "memory":
        console.print(Text(f"Kept in memory since the router's start, {found.since}; --usage-db keeps it in a file."))
    if found.problem is not None:
        console.print(Text(f"The file fails: {found.problem}"))


def _number(title: str, number: Callable[[Line], int], drop_order: int = 0) -> Column[Line]:
    return Column(title, lambda line: f"{number(line):,}", drop_order=drop_order)


COLUMNS: tuple[Column[Line], ...] = (
    Column("day", lambda line: line.day, right=False),
    Column("key", lambda line: line.key, right=False),
    Column("model", lambda line: line.model, right=False),
    _number("requests", lambda line: line.requests),
    _number("errors", lambda line: line.client_errors + line.server_errors, drop_order=4),
    _number("computed", lambda line: line.computed_tokens, drop_order=1),
    _number("cached", lambda line: line.cached_tokens),
    _number("generated", lambda line: line.generated_tokens),
    Column(
        "TTFT",
        lambda line: duration(line.first_token_s / line.first_tokens if line.first_tokens else None),
        drop_order=3,
    ),
    Column("saved", lambda line: f"{line.saved_s:,.1f} s", drop_order=2),
)
