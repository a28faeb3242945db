"""The difference of two replicas, or of two moments of one: the blocks that both have, and that only one has."""

from typing import NamedTuple

from events.analysis.tree import Node, Tree, media, subtree

BOTH = "both"
OTHER_MEDIA = "other media"


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

    def blocks(self, side: str) -> int:
        return sum(part.blocks for part in self.parts if part.side == side)

    def tokens(self, side: str) -> int:
        return sum(part.tokens for part in self.parts if part.side == side)


def compare(tree: Tree, left: str, right: str) -> Comparison:
    """Compare two replicas of one tree. Their engines' hashes may differ, since a tree names blocks by key."""
    side_of: dict[int, str | None] = {}
    top_of: dict[int, Node] = {}
    counted: dict[int, list[int]] = {}
    shared = [0, 0]
    for top in tree.tops():
        for node in subtree(top):
            side = side_of[node.key] = _side(node, left, right)
            if side in (BOTH, OTHER_MEDIA):
                _count(shared, node)
            if side in (BOTH, None):
                continue
            parent = node.parent
            joined = parent is not None and side_of[parent.key] == side
            first = top_of[node.key] = top_of[parent.key] if parent is not None and joined else node
            _count(counted.setdefault(first.key, [0, 0]), node)
    parts = [Part(tree.nodes[key], str(side_of[key]), *count) for key, count in counted.items()]
    return Comparison(shared[0], shared[1], sorted(parts, key=lambda part: part.blocks, reverse=True))


def _side(node: Node, left: str, right: str) -> str | None:
    """Name the side that has the block: one of the two, both, both in different media, or none."""
    on_left, on_right = media(node, left), media(node, right)
    if on_left and on_right:
        return BOTH if on_left == on_right else OTHER_MEDIA
    return left if on_left else right if on_right else None


def _count(sums: list[int], node: Node) -> None:
    sums[0] += 1
    sums[1] += node.tokens
