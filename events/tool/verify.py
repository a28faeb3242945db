"""`warmroute events verify`: does the tree built from the stream equal what the replica itself says it holds?"""

import asyncio
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import click
import msgspec
from rich.text import Text

from events.analysis.tree import Node, Tree, media, run_from, subtree, token_ids
from events.cache.pool import Digest
from events.source import Source
from events.stream.actions import Action, Compare
from events.tool.options import (
    StreamOptions,
    Target,
    for_option,
    json_option,
    open_target,
    stream_options,
    timeout_option,
)
from events.tool.output import Output, count, grid
from events.tool.streams import CannotTell, Following, Watch, played
from events.tool.words import content, place
from events.view import CacheView, Request

FOR_S = 5.0
WRONG_SHOWN = 10
EQUAL, DIFFERENT = 0, 1
STREAM, REPLICA, BOTH, OTHER_MEDIA = "stream", "replica", "both", "other media"
PARTS_SHOWN = 10  # on a terminal


@click.command()
@click.argument("target", metavar="FILE|ENDPOINT")
@stream_options
@for_option
@timeout_option
@json_option
def verify(target: str, stream: StreamOptions, for_s: float | None, timeout_s: float, as_json: bool) -> None:
    """Compare the tree built from a stream with the replica's own report of its cache.

    Follows the stream for --for SECONDS (5 if not given), then asks the replica anew: a warmroute replica for a
    snapshot, any other for a replay from batch 0, as far as its buffer goes back to there. The two trees are compared
    at the same batch, and every digest that a status brought on the way is compared at its own. Blocks that only the
    stream has are surplus, those that only the replica has are missing. In a recording the digests in it are compared.
    Exit status: 0 if all is equal, 1 if not, 2 if unknown.

    \b
    Examples:
      warmroute events verify tcp://10.0.0.7:5557 --status tcp://10.0.0.7:5559 --snapshot tcp://10.0.0.7:5560
      warmroute events verify tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:5558 --for 60
      warmroute events verify incident.wre
    """
    output = Output(as_json)
    opened = open_target(target, stream)
    equal = True
    for source in opened.sources:
        if opened.recording is None:
            result = asyncio.run(_live(opened, source, for_s or FOR_S, timeout_s))
        else:
            watch = Watch(opened, source, name=STREAM, view_type=Witness)
            witness = watch.view
            assert isinstance(witness, Witness)
            played([watch], output.note)
            if not witness.compared:
                raise CannotTell(
                    f"{source.name}: no digest in {opened.name}; record a warmroute replica, with --status"
                )
            result = Result(witness.stream.last_seq, witness.resolver.resident_blocks(), witness, None)
        show(output, source.name, result)
        equal = equal and result.equal
    click.get_current_context().exit(EQUAL if equal else DIFFERENT)


class Witness(CacheView):
    """Compares digests as the router does, and does not repair what differs: the difference is what we look for."""

    compared = 0
    wrong: tuple[tuple[int, Digest, Digest], ...] = ()  # batch, ours, and the replica's

    def perform(self, actions: Iterable[Action]) -> list[Request]:
        def others() -> Iterator[Action]:
            for action in actions:
                if not isinstance(action, Compare):
                    yield action
                    continue
                self.compared += 1
                if (ours := self.resolver.digest()) != action.digest:
                    self.wrong = (*self.wrong, (self.stream.last_seq, ours, action.digest))

        return super().perform(others())


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
    """Compare two replicas of one tree, which names blocks by key: their engines' hashes may differ."""
    side_of: dict[int, str | None] = {}  # None: neither holds it
    part_of: dict[int, list[Node]] = {}
    parts: list[list[Node]] = []
    shared: list[Node] = []
    for top in tree.tops():
        for node in subtree(top):
            on_left, on_right = media(node, left), media(node, right)
            if on_left and on_right:
                side: str | None = BOTH if on_left == on_right else OTHER_MEDIA
            else:
                side = left if on_left else right if on_right else None
            side_of[node.key] = side
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


class Result(NamedTuple):
    seq: int
    blocks: int
    digests: Witness
    comparison: Comparison | None

    @property
    def equal(self) -> bool:
        return not self.digests.wrong and (self.comparison is None or self.comparison.equal)


async def _live(target: Target, source: Source, for_s: float, timeout_s: float) -> Result:
    """Follow the stream for a while, and ask the replica anew: a second subscription, of the same stream."""
    name, tree = source.name, Tree()
    if not source.native and source.replay is None:
        raise CannotTell(f"{name}: nobody to ask; give --snapshot, or --replay for other engines")
    stream = Watch(target, source, name=STREAM, tree=tree, view_type=Witness)
    again = msgspec.structs.replace(source, name=f"{name} again", status=None)
    replica = Watch(target, again, name=REPLICA, tree=tree)
    witness, told, timeout = stream.view, replica.view.stream, f"within {timeout_s:g} s (--timeout)"
    assert isinstance(witness, Witness)

    def met() -> bool:
        """The replica has answered, and both are at the same batch."""
        if told.next_seq is None or not replica.settled:
            return False
        return replica.view.inexact is not None or told.next_seq == witness.stream.next_seq

    async with Following() as followed:
        followed.follow(stream)
        if not await followed.until(lambda: stream.settled, timeout_s):
            raise CannotTell(f"{name}: nothing came {timeout}")
        await followed.until(lambda: False, for_s)
        followed.follow(replica)
        if not await followed.until(met, timeout_s):
            if told.next_seq is None:
                raise CannotTell(f"{name}: the replica did not answer {timeout}")
            at = f"the stream is at batch {witness.stream.last_seq} and the replica at {told.last_seq}"
            raise CannotTell(f"{name}: {at}; they did not meet {timeout}")
        if replica.view.inexact is not None:
            raise CannotTell(f"{name}: what the replica says of itself is inexact: {replica.view.inexact}")
        comparison = compare(tree, STREAM, REPLICA)
        result = Result(told.last_seq, witness.resolver.resident_blocks(), witness, comparison)
        if source.status is not None:
            await followed.until(lambda: witness.compared > 0, timeout_s)
    return result


def show(output: Output, name: str, result: Result) -> None:
    digests = result.digests
    if output.json:
        wrong = [
            {"seq": seq, "stream": ours._asdict(), "replica": theirs._asdict()}
            for seq, ours, theirs in digests.wrong[:WRONG_SHOWN]
        ]
        fields = {
            "seq": result.seq,
            "blocks": result.blocks,
            "digests_compared": digests.compared,
            "digests_differed": len(digests.wrong),
            "digests_wrong": wrong,
        }
        output.line({"kind": "verify", "replica": name, "equal": result.equal, **fields})
    else:
        verdict = Text("equal", style="green") if result.equal else Text("DIFFERENT", style="bold red")
        table = grid()
        table.add_row("replica", Text.assemble((name, "bold"), "  ", verdict))
        table.add_row("held", f"{count(result.blocks, 'block')} at batch {result.seq}, by the stream")
        table.add_row("digests", f"{digests.compared:,} compared, {len(digests.wrong):,} wrong")
        for seq, ours, theirs in digests.wrong[:3]:
            table.add_row("", f"batch {seq}: {_digest(ours)} by the stream, {_digest(theirs)} by itself")
        output.console.print(table, soft_wrap=False)
    found = result.comparison
    if found is None or found.equal:
        return
    sides = [STREAM, REPLICA, OTHER_MEDIA]
    sizes = {side: found.only(side) for side in sides}
    if output.json:
        only = {side: {"blocks": blocks, "tokens": tokens} for side, (blocks, tokens) in sizes.items()}
        shared = {"blocks": found.shared_blocks, "tokens": found.shared_tokens}
        output.line({"kind": "summary", "equal": False, "shared": shared, "only": only})
        for part in found.parts:
            own = {
                "side": part.side,
                "blocks": part.blocks,
                "tokens": part.tokens,
                "key": f"{part.top.key:016x}",
                "place": place(part.top),
                "media": {side: media(part.top, side) for side in (STREAM, REPLICA)},
                "token_ids": token_ids(run_from(part.top).packed),
            }
            output.line({"kind": "part", **own})
        return
    table = grid()
    table.add_row(STREAM, "the tree built from it; blocks only here are surplus")
    table.add_row(REPLICA, "the replica itself")
    table.add_row("shared", f"{count(found.shared_blocks, 'block')}, {count(found.shared_tokens, 'token')}")
    labels = {side: side if side == OTHER_MEDIA else f"only {side}" for side in sides}
    for side, (blocks, tokens) in sizes.items():
        if side != OTHER_MEDIA or blocks:
            table.add_row(labels[side], f"{count(blocks, 'block')}, {count(tokens, 'token')}")
    for part in found.parts[:PARTS_SHOWN]:
        run = run_from(part.top)
        where = f"{count(part.blocks, 'block')} from {place(part.top)}: "
        table.add_row(labels[part.side], Text(where + content(run.packed, None, run.extras)))
    if (more := len(found.parts) - PARTS_SHOWN) > 0:
        table.add_row("…", Text(f"{count(more, 'part')} more (--json)"))
    output.console.print(table, soft_wrap=False)


def _digest(digest: Digest) -> str:
    return f"{count(digest.blocks, 'block')} ({digest.xor:016x})"
