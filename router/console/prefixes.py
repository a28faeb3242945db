"""Draws the response of GET /prefixes as a table."""

from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.text import Text

from events.tool.words import printable
from router.console.asking import Client
from router.console.formatting import Column, ago, count_of, cut, decoded, table_console
from router.console.table import Table, print_lines
from router.prompts.prefixes.tree import Prefix, Shared

BRANCH = "  "
DEEPEST = 8  # levels that are indented: a long conversation has one for each of its turns
MAX_TEXT = 120  # characters
MAX_NAMES = 30  # characters
NAMED = 3  # replicas; of more the number is said
HINT = "No texts are kept; start the router with --show-prompts to see them."


def ask(router_url: str, limit: int, key: str | None) -> bytes:
    with Client(router_url, key) as client:
        return client.ask("GET", "/prefixes", parameters={"limit": limit})


def draw(answer: bytes, file: TextIO, width: int | None = None) -> None:
    shared, console = decoded(answer, Shared), table_console(file, width)
    console.print(Text(heading(shared)))
    if not shared.prefixes:
        return
    rows, several = list(_rows(shared.prefixes)), len({prefix.model for prefix in shared.prefixes}) > 1
    table = Table(_columns(rows, several=several)[: None if shared.texts else -1])
    table.show(rows)
    head, *lines = table.lines(console.width, 1 + len(rows))
    console.print()
    print_lines(console, [[(text, "dim") for text, _ in head], *lines])
    if not shared.texts:
        console.print()
        console.print(Text(HINT, style="dim"))


def _rows(prefixes: Sequence[Prefix], depth: int = 0) -> Iterator[tuple[Prefix, int]]:
    """The prefixes of a tree with their depths in it."""
    for prefix in prefixes:
        yield prefix, depth
        yield from _rows(prefix.below, depth + 1)


def _columns(rows: Sequence[tuple[Prefix, int]], *, several: bool) -> tuple[Column[tuple[Prefix, int]], ...]:
    """`several`: they are of several models, which the roots of their trees name."""

    def tokens(row: tuple[Prefix, int]) -> str:
        prefix, depth = row
        model = f" {printable(prefix.model)}" if several and not depth else ""
        mark = f"{'' if prefix.exact else '~'}{'+' if depth else ''}"
        return f"{BRANCH * min(depth, DEEPEST)}{mark}{prefix.tokens:,}{model}"

    def held_by(row: tuple[Prefix, int]) -> str:
        return holders(row[0])

    def style(row: tuple[Prefix, int]) -> str:
        return "" if row[0].held_by else "dim"

    left: dict[str, Any] = {"right": False, "style": style}
    return (
        Column("tokens", tokens, width=max(6, *map(len, map(tokens, rows))), **left),
        Column("prompts", lambda row: row[0].prompts, count_of, 7, style=style),
        Column("last", lambda row: row[0].idle_s, ago, 4, style=style),
        Column("held by", held_by, width=min(MAX_NAMES, max(7, *map(len, map(held_by, rows)))), **left),
        Column("text", lambda row: cut(text_of(row[0]), MAX_TEXT), **left),
    )


def heading(shared: Shared) -> str:
    if not shared.prompts:
        return "No prompt is remembered."
    count = f"the last {shared.prompts:,} prompts" if shared.prompts > 1 else "the last prompt"
    what = "What {} share" if shared.prefixes else "Nothing is shared by {}"
    return f"{what.format(count)} ({ago(shared.span_s)})"


def holders(prefix: Prefix) -> str:
    """The replicas that hold it, and for how long they give it up last."""
    if not prefix.held_by:
        return "nobody"
    named = ", ".join(printable(prefix.named(name)) for name in prefix.replicas[:NAMED])
    more = prefix.held_by - min(NAMED, len(prefix.replicas))
    kept = "" if prefix.retained_s is None else f", kept {ago(prefix.retained_s)}"
    return named + (f" and {more:,} more" if more else "") + kept


def text_of(prefix: Prefix) -> str:
    return printable(" ".join((prefix.text or "").split()))
