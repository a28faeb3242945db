"""The differences of two sides, as `diff` and `verify` show them."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from events.analysis.compare import OTHER_MEDIA, Comparison, Part
from events.analysis.tree import media
from events.analysis.trunks import run_from, token_ids
from events.tool.output import Output, count
from events.tool.words import Decode, content, place


def show_comparison(
    output: Output, found: Comparison, names: Mapping[str, str], decode: Decode | None, top: int
) -> None:
    """`names` says what the two sides are; `top` is how many of the differing parts are listed (0: all)."""
    sides = [*names, OTHER_MEDIA]
    if output.json:
        fields = {
            side: {"name": names.get(side), "blocks": found.blocks(side), "tokens": found.tokens(side)}
            for side in sides
        }
        shared = {"blocks": found.shared_blocks, "tokens": found.shared_tokens}
        output.line({"kind": "summary", "equal": found.equal, "shared": shared, "only": fields})
        for part in found.parts[: top or None]:
            output.line({"kind": "part", **_fields(part, names)})
        return
    table = grid()
    for side, name in names.items():
        table.add_row(side, Text(name))
    table.add_row("shared", _blocks(found.shared_blocks, found.shared_tokens))
    for side in sides:
        label = side if side == OTHER_MEDIA else f"only {side}"
        if side != OTHER_MEDIA or found.blocks(side):
            table.add_row(label, _blocks(found.blocks(side), found.tokens(side)))
    output.console.print(table, soft_wrap=False)
    parts = found.parts
    table = grid()
    for part in parts[: top or None]:
        run = run_from(part.top)
        label = part.side if part.side == OTHER_MEDIA else f"only {part.side}"
        where = f"{count(part.blocks, 'block')} from {place(part.top)}: "
        table.add_row(label, Text(where + content(run.packed, decode, run.extras)))
    if top and len(parts) > top:
        table.add_row("…", Text(f"{count(len(parts) - top, 'part')} more (--top)"))
    if parts:
        output.console.print(table, soft_wrap=False)


def _fields(part: Part, names: Mapping[str, str]) -> dict[str, object]:
    node = part.top
    return {
        "side": part.side,
        "blocks": part.blocks,
        "tokens": part.tokens,
        "key": f"{node.key:016x}",
        "place": place(node),
        "media": {side: media(node, side) for side in names},
        "token_ids": token_ids(run_from(node).packed),
    }


def grid() -> Table:
    """Names at the left, one line of text for each at the right, cut at the width of the terminal."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, style="dim", min_width=12)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def _blocks(blocks: int, tokens: int) -> Text:
    return Text(f"{count(blocks, 'block')}, {count(tokens, 'token')}")
