"""Asks a router to explain a decision, and draws the response for people: block by block, replica by replica."""

import math
from collections.abc import Sequence
from typing import Any, TextIO

import click
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from events.tool.words import printable
from router.console.asking import Client
from router.console.formatting import decoded, duration, plain_console
from router.placement.decision import Portion, Verdict
from router.responses import Explanation

BAR_CELLS = ((100, 20), (72, 12), (0, 0))  # columns from which a bar has this many cells


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


# ---- asking


def ask(router_url: str, fields: dict[str, Any], key: str | None) -> bytes:
    """The router's response to POST /explain, for its only model unless the fields name one."""
    with Client(router_url, key) as client:
        if "model" not in fields:
            models = [model.id for model in client.get("/v1/models", _Models).data]
            if len(models) != 1:
                served = f"serves {', '.join(map(printable, models))}" if models else "serves no model yet"
                raise click.ClickException(f"the router at {client.url} {served}; name one with --model")
            fields = {"model": models[0], **fields}
        return client.ask("POST", "/explain", fields)


# ---- drawing


def draw(answer: bytes, file: TextIO, width: int | None = None) -> None:
    explanation, console = decoded(answer, Explanation), plain_console(file, width)
    console.print(Text(heading(explanation)))
    if explanation.candidates:
        console.print()
        console.print(table_of(explanation, plain=not console.is_terminal, width=console.width))
    explained = [each for each in ranked(explanation) if each.why]
    if explained:
        console.print()
    for each in explained:
        console.print(
            Text.assemble((f"  {printable(each.name)}  ", "bold"), printable(each.why)),
            soft_wrap=not console.is_terminal,
        )
        if brings(each.portions):
            console.print(f"    tokens: {', '.join(told_portions(each.portions))}", soft_wrap=not console.is_terminal)


def heading(explanation: Explanation) -> str:
    tokens = f"{explanation.prompt_tokens:,.0f} tokens"
    if explanation.exact:
        blocks = f" in {explanation.blocks:,} block{'s' * (explanation.blocks != 1)} of {explanation.block_size}"
        prompt = f"{tokens}{blocks if explanation.blocks else ', less than a block'}"
    else:
        why = f": {printable(explanation.why_not)}" if explanation.why_not else ""
        prompt = f"about {tokens} in {explanation.blocks:,} blocks, approximate{why}"
    chosen = f"goes to {printable(explanation.chosen)}" if explanation.chosen else "waits: no replica takes it now"
    head = f"{printable(explanation.model)}, {prompt}\nIt {chosen} (policy {printable(explanation.policy)})"
    if explanation.session is not None:
        head += f"\nIts session is {printable(explanation.session)} ({printable(explanation.session_from or '')})"
    if (prefill := explanation.prefill) is not None:
        where = printable(prefill.replica or "") if prefill.elsewhere else "there, too"
        head += f"\nIts prompt is computed {'at ' if prefill.elsewhere else ''}{where}: {printable(prefill.why)}"
    if explanation.prediction_exact or not explanation.why_inexact or not explanation.exact:
        return head
    return f"{head}\nIts cached tokens are an estimate: {printable(explanation.why_inexact)}"


def ranked(explanation: Explanation) -> list[Verdict]:
    """The candidates: the chosen one first, then available ones by cost, then the others."""

    def place(each: Verdict) -> tuple[bool, bool, float, str]:
        return (
            each.name != explanation.chosen,
            not each.available,
            math.inf if each.cost is None else each.cost,
            each.name,
        )

    return sorted(explanation.candidates, key=place)


def table_of(explanation: Explanation, *, plain: bool, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="" if plain else "dim")
    table.add_column("  replica", overflow="fold", min_width=12)
    cells = next(cells for columns, cells in BAR_CELLS if width >= columns)
    cells = min(cells, explanation.blocks)
    if cells:
        table.add_column("prompt", no_wrap=True)
    for title in ("cached", "queued", "running", "TTFT", "cost"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in ranked(explanation):
        chosen = each.name == explanation.chosen
        style = "" if plain else "bold green" if chosen else "" if each.available else "dim"
        bar = [bar_of(explanation.hits.get(each.name, ()), explanation.blocks, cells, plain=plain)] if cells else []
        table.add_row(f"{'>' if chosen else ' '} {printable(each.name)}", *bar, *numbers_of(each), style=style)
    return table


def numbers_of(each: Verdict) -> list[str]:
    slower_tokens = each.lower_tokens - each.matched_tokens
    cached = f"{each.matched_tokens:,.0f}" + (f"+{slower_tokens:,.0f}" if slower_tokens > 0 else "")
    if not each.available:
        return [cached, *["-"] * 4]
    return [cached, f"{each.queued_tokens:,.0f}", str(each.running), duration(each.ttft_s), duration(each.cost)]


def bar_of(hits: Sequence[tuple[int, int]], blocks: int, cells: int, *, plain: bool) -> str:
    """The prompt from left to right: cached, cached in part, not cached. A cell may stand for many blocks."""
    full, part, none = ("#", "+", ".") if plain else ("█", "▒", "·")
    bar = ""
    for cell in range(cells):
        first, after = cell * blocks // cells, (cell + 1) * blocks // cells
        held = sum(max(0, min(last + 1, after) - max(start, first)) for start, last in hits)
        bar += full if held >= after - first else part if held else none
    return bar


# On the wire an engine's own KV cache is called GPU, on a machine without one, too.
PLACES = {"GPU": "in its KV cache", "CPU": "from host memory", "STORAGE": "from disk", "COMPUTE": "computed"}


def told_portions(portions: Sequence[Portion]) -> list[str]:
    """`2,048 in its KV cache`, `1,024 from host memory in 10 ms`, `808 computed in 101 ms`."""
    told = []
    for one in portions:
        names = " or ".join(map(printable, one.neighbours)) or "a neighbour"
        place = PLACES.get(one.source, f"from {names}")
        took = f" in {duration(one.seconds)}" if one.seconds else ""
        told.append(f"{one.tokens:,.0f} {place}{took}")
    return told


def brings(portions: Sequence[Portion]) -> bool:
    """Return whether a part comes neither from its KV cache nor from computing."""
    return any(one.source not in ("GPU", "COMPUTE") for one in portions)
