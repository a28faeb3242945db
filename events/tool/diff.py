"""`warmroute events diff`: what two replicas, or two moments of one, share and what only one has."""

from collections.abc import Mapping
from typing import NamedTuple

import click
from rich.table import Table
from rich.text import Text

from events.analysis.tree import Node, Tree, media, run_from, subtree, token_ids
from events.recording.recording import Moment
from events.tool.options import (
    MomentType,
    StreamOptions,
    json_option,
    open_targets,
    stream_options,
    timeout_option,
    tokenizer_option,
)
from events.tool.output import Output, count
from events.tool.streams import Watch, load
from events.tool.words import Decode, content, place

EQUAL, DIFFERENT = 0, 1
PARTS_SHOWN = 10  # on a terminal
BOTH = "both"
OTHER_MEDIA = "other media"


@click.command()
@click.argument("left", metavar="A")
@click.argument("right", metavar="B")
@stream_options
@click.option("--at-a", type=MomentType(), help="The moment of A: 1234 (a batch), +12.5 (seconds) or an ISO time.")
@click.option("--at-b", type=MomentType(), help="The moment of B.")
@click.option("--replica-a", metavar="NAME", help="Which replica of A, if it holds several.")
@click.option("--replica-b", metavar="NAME", help="Which replica of B.")
@tokenizer_option
@timeout_option
@json_option
def diff(
    left: str,
    right: str,
    stream: StreamOptions,
    at_a: Moment | None,
    at_b: Moment | None,
    replica_a: str | None,
    replica_b: str | None,
    decode: Decode | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Compare two replicas, or one at two moments: list the blocks that only one side has.

    A and B are recordings or endpoints; the same recording twice, with --at-a and --at-b, compares two moments. Blocks
    are compared by the keys of their content, so the engines' hashes, seeds and versions may differ. Listed are the
    topmost blocks of the parts that only one side has, the largest first. With two endpoints, give --replay and the
    like once for each, A first. Exit status: 0 if both hold the same, 1 if not, 2 if unknown.

    \b
    Examples:
      warmroute events diff monday.wre tuesday.wre
      warmroute events diff incident.wre incident.wre --at-a +10 --at-b +20
      warmroute events diff tcp://10.0.0.7:5557 tcp://10.0.0.8:5557 \\
          --replay tcp://10.0.0.7:5558 --replay tcp://10.0.0.8:5558
    """
    output = Output(as_json)
    opened = open_targets([left, right], stream)
    tree = Tree()
    sides = [
        Watch(opened[0], opened[0].chosen(replica_a, "--replica-a"), name="A", tree=tree),
        Watch(opened[1], opened[1].chosen(replica_b, "--replica-b"), name="B", tree=tree),
    ]
    load(sides, timeout_s, output.note, [at_a, at_b])
    for side in sides:
        if side.view.inexact is not None:
            output.note(f"{side.view.name} ({side.target.name}) is inexact: {side.view.inexact}")
    found = compare(tree, "A", "B")
    show_comparison(output, found, {"A": opened[0].name, "B": opened[1].name}, decode)
    click.get_current_context().exit(EQUAL if found.equal else DIFFERENT)


class Part(NamedTuple):
    """A part of the tree that only one side has, or that the two have in different media, by its topmost block."""

    top: Node
    side: str
    blocks: int
    tokens: int


class Comparison(NamedTuple):
    shared_blocks: int
    shared_tokens: int
    parts: list[Part]  # the largest first

    @property
    def equal(self) -> bool:
        return not self.parts

    def only(self, side: str) -> tuple[int, int]:
        """Return the blocks and tokens of the parts that only one side has."""
        parts = [part for part in self.parts if part.side == side]
        return sum(part.blocks for part in parts), sum(part.tokens for part in parts)


def compare(tree: Tree, left: str, right: str) -> Comparison:
    """Compare two replicas of one tree. Their engines' hashes may differ, since a tree names blocks by key."""
    side_of: dict[int, str | None] = {}
    part_of: dict[int, list[Node]] = {}
    parts: list[list[Node]] = []
    shared: list[Node] = []
    for top in tree.tops():
        for node in subtree(top):
            side = side_of[node.key] = _side(node, left, right)
            if side in (BOTH, OTHER_MEDIA):
                shared.append(node)
            if side in (BOTH, None):
                continue
            if node.parent is not None and side_of[node.parent.key] == side:
                part_of[node.key] = part_of[node.parent.key]
            else:
                part_of[node.key] = []
                parts.append(part_of[node.key])
            part_of[node.key].append(node)
    parts.sort(key=len, reverse=True)
    differing = [Part(part[0], str(side_of[part[0].key]), len(part), sum(n.tokens for n in part)) for part in parts]
    return Comparison(len(shared), sum(node.tokens for node in shared), differing)


def _side(node: Node, left: str, right: str) -> str | None:
    """Name the side that has the block: one of the two, both, both in different media, or none."""
    on_left, on_right = media(node, left), media(node, right)
    if on_left and on_right:
        return BOTH if on_left == on_right else OTHER_MEDIA
    return left if on_left else right if on_right else None


def show_comparison(output: Output, found: Comparison, names: Mapping[str, str], decode: Decode | None = None) -> None:
    """`names` says what the two sides are."""
    sides = [*names, OTHER_MEDIA]
    if output.json:
        sizes = {side: found.only(side) for side in sides}
        fields = {side: {"name": names.get(side), "blocks": b, "tokens": t} for side, (b, t) in sizes.items()}
        shared = {"blocks": found.shared_blocks, "tokens": found.shared_tokens}
        output.line({"kind": "summary", "equal": found.equal, "shared": shared, "only": fields})
        for part in found.parts:
            own = {
                "side": part.side,
                "blocks": part.blocks,
                "tokens": part.tokens,
                "key": f"{part.top.key:016x}",
                "place": place(part.top),
                "media": {side: media(part.top, side) for side in names},
                "token_ids": token_ids(run_from(part.top).packed),
            }
            output.line({"kind": "part", **own})
        return
    table = grid()
    for side, name in names.items():
        table.add_row(side, Text(name))
    table.add_row("shared", f"{count(found.shared_blocks, 'block')}, {count(found.shared_tokens, 'token')}")
    labels = {side: side if side == OTHER_MEDIA else f"only {side}" for side in sides}
    for side, label in labels.items():
        blocks, tokens = found.only(side)
        if side != OTHER_MEDIA or blocks:
            table.add_row(label, f"{count(blocks, 'block')}, {count(tokens, 'token')}")
    for part in found.parts[:PARTS_SHOWN]:
        run = run_from(part.top)
        where = f"{count(part.blocks, 'block')} from {place(part.top)}: "
        table.add_row(labels[part.side], Text(where + content(run.packed, decode, run.extras)))
    if (more := len(found.parts) - PARTS_SHOWN) > 0:
        table.add_row("…", Text(f"{count(more, 'part')} more (--json)"))
    output.console.print(table, soft_wrap=False)


def grid() -> Table:
    """Names at the left, one line of text for each at the right, cut at the width of the terminal."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, style="dim", min_width=12)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    return table
