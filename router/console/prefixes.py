"""Draws the response of GET /prefixes as a table: a line for each prefix, below the one that it continues."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TextIO

from rich.text import Text

from events.tool.words import printable
from router.console.asking import Client
from router.console.formatting import Column, ago, decoded, short, table_console
from router.console.table import Table, print_lines
from router.prompts.prefixes.tree import Prefix, Shared

HINT = "No texts are kept; start the router with --show-prompts to see them."
BRANCH, DEEPEST = "  ", 8  # levels that are indented: a long conversation has one for each of its turns
NAMED = 3  # replicas; of more the number is said


class Line(NamedTuple):
    prefix: Prefix
    depth: int  # in the tree


def ask(router_url: str, limit: int, key: str | None) -> bytes:
    with Client(router_url, key) as client:
        return client.ask("GET", "/prefixes", parameters={"limit": limit})


def draw(answer: bytes, file: TextIO, width: int | None = None) -> None:
    shared, console = decoded(answer, Shared), table_console(file, width)
    console.print(Text(heading(shared)))
    if not shared.prefixes:
        return
    table, lines = Table(COLUMNS), list(lines_of(shared.prefixes))
    table.show(lines)
    head, *rows = table.lines(console.width, 1 + len(lines))
    console.print()
    print_lines(console, [[(text, "dim") for text, _ in head], *rows])
    if not shared.texts:
        console.print()
        console.print(Text(HINT, style="dim"))


def heading(shared: Shared) -> str:
    if not shared.prompts:
        return "No prompt is remembered."
    count = f"the last {shared.prompts:,} prompts" if shared.prompts > 1 else "the last prompt"
    what = "What {} share" if shared.prefixes else "Nothing is shared by {}"
    return f"{what.format(count)} ({ago(shared.span_s)})"


def lines_of(prefixes: Sequence[Prefix], depth: int = 0) -> Iterator[Line]:
    for prefix in prefixes:
        yield Line(prefix, depth)
        yield from lines_of(prefix.below, depth + 1)


def tokens(line: Line) -> str:
    mark = f"{'' if line.prefix.exact else '~'}{'+' * (line.depth > 0)}"
    return f"{BRANCH * min(line.depth, DEEPEST)}{mark}{line.prefix.tokens:,}"


def saved(line: Line) -> str:
    """Prompt tokens that a cache saves: all prompts but the first can reuse the prefix."""
    return short(line.prefix.tokens * (line.prefix.prompts - 1))


def holders(line: Line) -> str:
    prefix = line.prefix
    if not prefix.held_by:
        return "nobody"
    named = ", ".join(printable(prefix.named(name)) for name in prefix.replicas[:NAMED])
    more = prefix.held_by - min(NAMED, len(prefix.replicas))
    return named + (f" and {more:,} more" if more else "")


def text(line: Line) -> str:
    return printable(" ".join((line.prefix.text or "").split()))


COLUMNS: tuple[Column[Line], ...] = (
    Column(
        "prefix tokens", tokens, width=13, right=False, fit=True, style=lambda line: "dim" * (not line.prefix.held_by)
    ),
    Column("prompts", lambda line: line.prefix.prompts, "{:,}".format, 7),
    Column("saves", saved, width=5, drop_order=3),
    Column("last", lambda line: line.prefix.idle_s, ago, 5, 1),
    Column("held by", holders, width=8, drop_order=2, right=False, fit=True),
    Column(
        "model",
        lambda line: printable(line.prefix.model),
        width=5,
        drop_order=10,
        right=False,
        fit=True,
        is_shown=lambda lines: len({line.prefix.model for line in lines}) > 1,
    ),
    Column("text", text, right=False, is_shown=lambda lines: any(line.prefix.text for line in lines)),
)
