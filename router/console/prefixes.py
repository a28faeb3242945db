"""Draws the response of GET /prefixes as a table."""

from typing import TextIO

from rich.text import Text

from router.console.asking import Client
from router.console.formatting import ago, decoded, table_console
from router.console.table import print_lines
from router.console.top.tables import prefix_rows, prefix_table
from router.prompts.prefixes.tree import Shared

HINT = "No texts are kept; start the router with --show-prompts to see them."


def ask(router_url: str, limit: int, key: str | None) -> bytes:
    with Client(router_url, key) as client:
        return client.ask("GET", "/prefixes", parameters={"limit": limit})


def draw(answer: bytes, file: TextIO, width: int | None = None) -> None:
    shared, console = decoded(answer, Shared), table_console(file, width)
    console.print(Text(heading(shared)))
    if not shared.prefixes:
        return
    table, rows = prefix_table(sorted_by=""), prefix_rows(shared.prefixes)
    table.show(rows)
    head, *lines = table.lines(console.width, 1 + len(rows))
    console.print()
    print_lines(console, [[(text, "dim") for text, _ in head], *lines])
    if not shared.texts:
        console.print()
        console.print(Text(HINT, style="dim"))


def heading(shared: Shared) -> str:
    if not shared.prompts:
        return "No prompt is remembered."
    count = f"the last {shared.prompts:,} prompts" if shared.prompts > 1 else "the last prompt"
    what = "What {} share" if shared.prefixes else "Nothing is shared by {}"
    return f"{what.format(count)} ({ago(shared.span_s)})"
