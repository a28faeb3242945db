"""`warmroute events tree`: the prefix tree, drawn."""

from collections.abc import Iterator, Sequence
from typing import Any

import click
import rich.tree
from rich.text import Text

from events.analysis.tree import Node, Tree, all_runs, runs_below, sizes, token_ids
from events.recording import Moment
from events.tool.options import (
    MomentType,
    StreamOptions,
    json_option,
    open_target,
    stream_options,
    timeout_option,
    tokenizer_option,
)
from events.tool.output import Output, count, plain
from events.tool.streams import CannotTell, Watch, follow, played
from events.tool.words import Decode, content, restrictions

DEPTH = 4
BRANCHES = 8  # drawn at each fork


@click.command()
@click.argument("target", metavar="FILE|ENDPOINT")
@stream_options
@click.option("--depth", default=DEPTH, show_default=True, metavar="N", help="How many trunks deep to draw; 0: all.")
@tokenizer_option
@click.option("--at", type=MomentType(), help="The moment of a recording: 1234 (a batch), +12.5 (s) or an ISO time.")
@timeout_option
@json_option
def tree(
    target: str,
    stream: StreamOptions,
    depth: int,
    decode: Decode | None,
    at: Moment | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Draw the tree of cached prefixes.

    Blocks that follow one another without a fork, held in the same place, are merged into one line: how many blocks and
    tokens, where they are, what is below, and how the text begins (token ids without a tokenizer). Namespaces (LoRA,
    cache salt, block size) share nothing. "gone" is a block that was evicted while its descendants were kept: they hit
    again when it returns. "detached" is a parent that was named and never seen. Of an ENDPOINT the cache is drawn as
    soon as it is known, of a FILE as it was at the end, or --at a moment.

    \b
    Examples:
      warmroute events tree incident.wre --depth 2 --at +60
      warmroute events tree tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:5558 --tokenizer ~/models/qwen
      warmroute events tree incident.wre --json | jq 'select(.tokens > 1000)'
    """
    output = Output(as_json)
    opened = open_target(target, stream)
    drawn = Tree()
    watched = [Watch(opened, source, tree=drawn) for source in opened.sources]
    live = played(watched, output.note, at)
    if live and not follow(live, until=lambda: all(watch.settled for watch in live), limit_s=timeout_s):
        for watch in live:
            if watch.view.stream.next_seq is None:
                raise CannotTell(f"{watch.source.events}: nothing came within {timeout_s:g} s (--timeout)")
    if output.json:
        for line in json_lines(drawn, decode):
            output.line(line)
    else:
        output.console.print(Drawing(drawn, watched, decode, depth).draw(opened.name), soft_wrap=False)
    for watch in watched:
        for remark in remarks(watch):
            output.note(remark)


class Drawing:
    def __init__(self, drawn: Tree, watched: Sequence[Watch], decode: Decode | None, depth: int) -> None:
        self._tree = drawn
        self._several = len(watched) > 1
        self._decode = decode
        self._depth = depth or len(drawn.nodes) + 1
        self._sizes = sizes(drawn)

    def draw(self, title: str) -> rich.tree.Tree:
        tops = self._tree.tops()
        below = [self._sizes[top.key] for top in tops]
        held = f"{count(sum(s.blocks for s in below), 'block')}, {count(sum(s.tokens for s in below), 'token')}"
        drawing = rich.tree.Tree(_line((title, "bold"), (f"  {held}", "")), guide_style="dim")
        known, detached = [top for top in tops if not top.detached], [top for top in tops if top.detached]
        detached.sort(key=lambda top: self._sizes[top.key].tokens, reverse=True)
        for top in [*known, *detached[:BRANCHES]]:
            name = (f"detached below {top.key:016x}", "yellow")
            if top.namespace is not None:
                within = [*restrictions(top.namespace), f"blocks of {top.namespace.block_size}"]
                name = (", ".join(within), "cyan")
            pending = [(drawing.add(_line(name, (f"  {self._below([top])}", "dim"))), top, 1)]
            while pending:
                parent, node, level = pending.pop()
                runs = runs_below(node, self._sizes)
                shown = runs[:BRANCHES] if level <= self._depth else []
                for run in shown:
                    places = {f"{h.medium}({h.replica})" if self._several else h.medium for h in run.held}
                    where = " ".join(sorted(places)) or "gone"
                    size = f"{count(run.blocks, 'block')}, {count(run.tokens, 'token')}"
                    parts = [(size, "bold"), (f"  {where}", "green" if run.held else "red")]
                    if run.last.children:
                        parts.append((f"  {self._below(list(run.last.children.values()))} below", "dim"))
                    line = _line(*parts, (f"  {content(run.packed, self._decode, run.extras)}", ""))
                    pending.append((parent.add(line), run.last, level + 1))
                if left_out := runs[len(shown) :]:
                    parent.add(_line((f"… {self._below([run.first for run in left_out])}", "dim")))
        if hidden := detached[BRANCHES:]:
            drawing.add(_line((f"… {count(len(hidden), 'detached parent')} more: {self._below(hidden)}", "dim")))
        return drawing

    def _below(self, nodes: Sequence[Node]) -> str:
        found = [self._sizes[node.key] for node in nodes]
        blocks, leaves = sum(size.blocks for size in found), sum(size.leaves for size in found)
        return f"{count(blocks, 'block')} in {count(leaves, 'branch')}"


def remarks(watch: Watch) -> Iterator[str]:
    """Facts about a replica that the drawing cannot show."""
    view = watch.view
    if view.inexact is not None:
        yield f"{view.name}: inexact: {view.inexact}"
    if waiting := view.resolver.orphan_blocks:
        yield f"{view.name}: {count(waiting, 'block')} not drawn: their parents have not been seen (orphans)"
    if unpaired := view.resolver.stats.unpaired_blocks:
        yield f"{view.name}: {count(unpaired, 'block')} not drawn: their tokens do not fit their hashes"


def json_lines(drawn: Tree, decode: Decode | None) -> Iterator[dict[str, Any]]:
    """One object for each run, parents before children; `key` is its last block's, `parent` that before its first."""
    found = sizes(drawn)
    tops = {top.key: top for top in drawn.tops()}
    top_of: dict[int, Node] = {}
    for run, blocks_before, tokens_before in all_runs(drawn):
        parent = run.first.parent
        assert parent is not None
        top = top_of[run.last.key] = tops.get(parent.key) or top_of[parent.key]
        ids = token_ids(run.packed)
        yield {
            "key": f"{run.last.key:016x}",
            "parent": None if parent is top and not top.detached else f"{parent.key:016x}",
            "namespace": None if top.namespace is None else plain(top.namespace._asdict()),
            "blocks_before": blocks_before,
            "tokens_before": tokens_before,
            "blocks": run.blocks,
            "tokens": run.tokens,
            "held": [holder._asdict() for holder in dict.fromkeys(run.held)],
            "at_and_below": found[run.first.key]._asdict(),
            "first_stored": run.first.first_stored_s,
            "last_event": max(node.last_event_s for node in run.nodes),
            "extras": plain(run.extras),
            "token_ids": ids,
            "text": None if decode is None else decode(list(ids)),
        }


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
