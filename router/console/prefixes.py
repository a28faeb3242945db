"""Draws the response of GET /prefixes as a table."""

from typing import TextIO

from rich.table import Table
from rich.text import Text

from events.tool.words import printable
from router.console.asking import Client
from router.console.formatting import PIPED_COLUMNS, ago, cut, decoded, table_console
from router.prompts.prefixes.tree import Prefix, Shared

BRANCH = "  "
DEEPEST = 8  # levels that are indented: a long conversation has one for each of its turns
MOST_TEXT = 120  # characters
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
    console.print()
    console.print(table_of(shared, plain=not console.is_terminal, width=console.width))
    if not shared.texts:
        console.print()
        console.print(Text(HINT, style="dim" if console.is_terminal else ""))


def heading(shared: Shared) -> str:
    if not shared.prompts:
        return "No prompt is remembered."
    count = f"the last {shared.prompts:,} prompts" if shared.prompts > 1 else "the last prompt"
    what = "What {} share" if shared.prefixes else "Nothing is shared by {}"
    return f"{what.format(count)} ({ago(shared.span_s)})"


def table_of(shared: Shared, *, plain: bool, width: int) -> Table:
    style = "" if plain else "dim"
    fills = shared.texts and width < PIPED_COLUMNS  # in a pipe no line ends in spaces
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=style, expand=fills)
    models = {prefix.model for prefix in shared.prefixes}
    table.add_column("tokens", no_wrap=True)
    table.add_column("prompts", justify="right", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    table.add_column("held by", no_wrap=True, overflow="ellipsis", max_width=30)
    if shared.texts:
        table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1 if fills else None)
    several = len(models) > 1
    for prefix in shared.prefixes:
        _add(table, prefix, 0, several=several, texts=shared.texts, plain=plain)
    return table


def _add(table: Table, prefix: Prefix, depth: int, *, several: bool, texts: bool, plain: bool) -> None:
    model = f" {printable(prefix.model)}" if several and not depth else ""
    row = [
        f"{BRANCH * min(depth, DEEPEST)}{'' if prefix.exact else '~'}{'+' if depth else ''}{prefix.tokens:,}{model}",
        f"{prefix.prompts:,}",
        ago(prefix.idle_s),
        holders(prefix),
    ]
    if texts:
        row.append(cut(printable(" ".join((prefix.text or "").split())), MOST_TEXT))
    table.add_row(*row, style="" if plain or prefix.held_by else "dim")
    for below in prefix.below:
        _add(table, below, depth + 1, several=several, texts=texts, plain=plain)


def holders(prefix: Prefix) -> str:
    """The replicas that hold it, and for how long they give it up last."""
    if not prefix.held_by:
        return "nobody"
    named = ", ".join(printable(prefix.named(name)) for name in prefix.replicas[:NAMED])
    more = prefix.held_by - min(NAMED, len(prefix.replicas))
    kept = "" if prefix.retained_s is None else f", kept {ago(prefix.retained_s)}"
    return named + (f" and {more:,} more" if more else "") + kept
