"""Views of a prefix tree: runs, sizes, longest chains, hottest prefixes, text.

A run is a chain of blocks in which each but the last has exactly one child and all have the same holders. A trunk is a
run that is shared: more than one branch goes on below it.
"""

import heapq
import struct
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from events.analysis.tree import Holder, Node, Tree, subtree
from events.blocks import TOKEN_BYTES, ExtraKey


class Run(NamedTuple):
    nodes: list[Node]

    @property
    def first(self) -> Node:
        return self.nodes[0]

    @property
    def last(self) -> Node:
        return self.nodes[-1]

    @property
    def blocks(self) -> int:
        return len(self.nodes)

    @property
    def tokens(self) -> int:
        return sum(node.tokens for node in self.nodes)

    @property
    def packed(self) -> bytes:
        return b"".join(node.packed for node in self.nodes)

    @property
    def held(self) -> tuple[Holder, ...]:
        return self.nodes[0].held

    @property
    def extras(self) -> list[ExtraKey]:
        """Images (id, offset in their block) and prompt embeddings that stand in the run."""
        return [extra for node in self.nodes for extra in node.extras]


class Size(NamedTuple):
    """Blocks resident at and below a node, and how often that part of the tree was used."""

    blocks: int
    tokens: int
    leaves: int
    # Distinct continuations seen at or below the node, evicted ones included: 1 + its forks + those below it.
    uses: int


class Chain(NamedTuple):
    """A leaf with the length of the prompt that ends there."""

    leaf: Node
    blocks: int
    tokens: int


class Placed(NamedTuple):
    """A run with the blocks and tokens of its prompt that stand before it."""

    run: Run
    blocks_before: int
    tokens_before: int


class HotPrefix(NamedTuple):
    """A trunk, the length of the prefix that ends with it, and the prefill that sharing the trunk has saved.

    saved tokens = (uses - 1) * tokens of the trunk: all continuations but the first found it in the cache. Counted by
    trunk, not by prefix, so that nested trunks are not counted twice.
    """

    run: Run
    prefix_tokens: int
    uses: int
    saved_tokens: int


def run_from(first: Node) -> Run:
    nodes = [first]
    while len(nodes[-1].children) == 1:
        [child] = nodes[-1].children.values()
        if child.held != first.held:
            break
        nodes.append(child)
    return Run(nodes)


def runs_below(node: Node, sizes: dict[int, Size]) -> list[Run]:
    """The runs that begin right below a node, the largest subtree first."""
    children = sorted(node.children.values(), key=lambda child: sizes[child.key].tokens, reverse=True)
    return [run_from(child) for child in children]


def all_runs(tree: Tree) -> Iterator[Placed]:
    """Every run of the tree, parents before children."""
    pending = [(child, 0, 0) for top in tree.tops() for child in top.children.values()]
    while pending:
        node, blocks, tokens = pending.pop()
        run = run_from(node)
        yield Placed(run, blocks, tokens)
        blocks, tokens = blocks + run.blocks, tokens + run.tokens
        pending += [(child, blocks, tokens) for child in run.last.children.values()]


def sizes(tree: Tree) -> dict[int, Size]:
    """The size of every node's subtree by its key."""
    found: dict[int, Size] = {}
    for top in tree.tops():
        for node in reversed(list(subtree(top))):
            below = [found[key] for key in node.children]
            own = bool(node.held)
            found[node.key] = Size(
                own + sum(size.blocks for size in below),
                own * node.tokens + sum(size.tokens for size in below),
                sum(size.leaves for size in below) if below else 1,
                1 + node.forks + sum(size.uses - 1 for size in below),
            )
    return found


def longest_chains(tree: Tree, count: int) -> list[Chain]:
    """The leaves with the most tokens before and in them."""
    chains = (
        Chain(run.last, blocks + run.blocks, tokens + run.tokens)
        for run, blocks, tokens in all_runs(tree)
        if not run.last.children
    )
    return heapq.nlargest(count, chains, key=attrgetter("tokens"))


def hottest_prefixes(tree: Tree, count: int) -> list[HotPrefix]:
    """The trunks whose sharing has saved the most prefill so far."""
    found = sizes(tree)
    hot = (
        HotPrefix(run, before + run.tokens, uses, (uses - 1) * run.tokens)
        for run, _, before in all_runs(tree)
        if (uses := found[run.first.key].uses) > 1
    )
    return heapq.nlargest(count, hot, key=attrgetter("saved_tokens"))


def token_ids(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


def load_tokenizer(folder: str) -> Callable[[list[int]], str]:
    """The decoder of a model folder's `tokenizer.json` (or of that file); special tokens are shown."""
    from pathlib import Path

    from tokenizers import Tokenizer  # slow to import, and only text needs it

    file = Path(folder)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"{file} does not exist; name a folder with a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
