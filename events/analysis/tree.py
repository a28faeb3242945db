"""The prefix tree of one or several replicas, with tokens and parents: for the tools only, the router never has it.

A node is one block, named by its key. It stands in the tree while it or a descendant is resident: the descendants of a
removed block are kept, because they hit again when it returns. At the top are the namespaces (LoRA name, cache salt and
block size: what the root key is made of), and detached nodes: blocks of which only the key is known, because a replica
whose hashes are keys named them as a parent and never stored them.

A run is a chain of blocks in which each but the last has exactly one child and all have the same holders.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from events.blocks import TOKEN_BYTES, ExtraKey
from events.cache.changes import Change, Cleared, Removed, Stored
from events.cache.extras import block_extras, chain_salt, packed_tokens
from events.cache.resolver import Resolver
from events.messages import decode_tokens


class Holder(NamedTuple):
    """A replica that has a copy of a block, and its medium."""

    replica: str
    medium: str


class Namespace(NamedTuple):
    """The root of a chain, before block 0: prompts of different namespaces share nothing."""

    lora_name: str | None
    cache_salt: str | None
    block_size: int


class Node(Struct, eq=False, weakref=True):
    """One block, or the top of a tree (a namespace, or a detached parent of which only the key is known)."""

    key: int
    parent: "Node | None"
    first_stored_s: float
    last_event_s: float
    namespace: Namespace | None = None
    children: dict[int, "Node"] = {}
    packed: bytes = b""
    extras: tuple[ExtraKey, ...] = ()
    held: tuple[Holder, ...] = ()  # sorted, and interned by the tree

    @property
    def detached(self) -> bool:
        """Only the key is known: it was named as a parent and never stored."""
        return self.parent is None and self.namespace is None

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES


class Tree:
    """Fed with the changes of keys that a resolver reports; `check` compares it with the resolver."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self._interned: dict[tuple[Holder, ...], tuple[Holder, ...]] = {}

    def apply(self, replica: str, changes: Iterable[Change], at_s: float) -> None:
        """All changes of one batch: a parent without a copy must outlive the change that brings its child."""
        loose: list[Node] = []
        for change in changes:
            if isinstance(change, Stored):
                # A foreign tier that names blocks by hash alone names no parent: its blocks are known from another.
                loose += self._place(change, at_s)[-1:] if change.parent_key else []
                holder = Holder(replica, place(change.medium, change.group))
                for key in change.keys:
                    node = self.nodes.get(key) or self._add(key, None, at_s)
                    node.held = self._intern((*node.held, holder))
                    node.last_event_s = at_s
            elif isinstance(change, Removed):
                holder = Holder(replica, place(change.medium, change.group))
                for key in change.keys:
                    node = self.nodes[key]
                    held = list(node.held)
                    held.remove(holder)
                    node.held = self._intern(held)
                    node.last_event_s = at_s
                    loose.append(node)
            elif isinstance(change, Cleared):
                self.forget(replica)
        for node in loose:
            self._prune(node)

    def forget(self, replica: str) -> None:
        loose = []
        for node in self.nodes.values():
            if any(holder.replica == replica for holder in node.held):
                node.held = self._intern(holder for holder in node.held if holder.replica != replica)
                loose.append(node)
        for node in loose:
            self._prune(node)
        self._interned = {held: held for held in self._interned if all(h.replica != replica for h in held)}

    def tops(self) -> list[Node]:
        """Namespaces first, then detached nodes; each in the order of its first store."""
        tops = [node for node in self.nodes.values() if node.parent is None]
        return sorted(tops, key=lambda node: node.detached)

    def _place(self, change: Stored, at_s: float) -> list[Node]:
        """Return the nodes of the event's blocks, in order, adding missing ones."""
        event = decode_tokens(change.event)
        parent = self.nodes.get(change.parent_key)
        if parent is None:
            root = Namespace(event.lora_name, chain_salt(event), event.block_size)
            parent = self._add(change.parent_key, None, at_s, root if event.parent_block_hash is None else None)
        stride = event.block_size * TOKEN_BYTES
        packed = packed_tokens(event) or b""  # none only from a native replica, whose tokens the resolver does not read
        if len(packed) != stride * len(change.chain):
            packed = b""
        extras = block_extras(event) or {}
        nodes = []
        for index, key in enumerate(change.chain):
            node = self.nodes.get(key)
            if node is None or (node.detached and node not in ancestors(parent)):
                if node is None:
                    node = self._add(key, parent, at_s)
                node.parent, parent.children[key] = parent, node
                node.packed, node.extras = packed[index * stride : (index + 1) * stride], tuple(extras.get(index, ()))
            node.last_event_s = at_s
            nodes.append(node)
            parent = node
        return nodes

    def _add(self, key: int, parent: Node | None, at_s: float, namespace: Namespace | None = None) -> Node:
        node = self.nodes[key] = Node(key, parent, at_s, at_s, namespace)
        if parent is not None:
            parent.children[key] = node
        return node

    def _prune(self, node: Node | None) -> None:
        """Remove the node if nothing at or below it is resident, then check its parent."""
        while node is not None and not node.held and not node.children and self.nodes.get(node.key) is node:
            del self.nodes[node.key]
            parent, node.parent = node.parent, None
            if parent is not None:
                del parent.children[node.key]
            node = parent

    def _intern(self, held: Iterable[Holder]) -> tuple[Holder, ...]:
        ordered = tuple(sorted(held))
        return self._interned.setdefault(ordered, ordered)

    def check(self, resolvers: Mapping[str, Resolver]) -> None:
        """Raise AssertionError if the tree is inconsistent, or differs from the replicas' resolvers."""
        reached = 0
        for top in self.tops():
            for node in subtree(top):
                reached += 1
                assert self.nodes.get(node.key) is node, f"{node} is linked but not listed"
                assert node.held or node.children, f"{node} is a leaf that nobody holds"
                assert all(child.parent is node for child in node.children.values()), f"{node}: a child is not its own"
                assert node.held == tuple(sorted(node.held)), f"{node}: holders out of order"
        assert reached == len(self.nodes), f"{len(self.nodes)} nodes, {reached} of them reached from the top"
        held = Counter((holder, node.key) for node in self.nodes.values() for holder in node.held)
        truth = {
            (Holder(replica, place(pool.medium, pool.group)), key)
            for replica, resolver in resolvers.items()
            for pool in resolver.pools.values()
            for key in pool.held
        }
        surplus, missing = held - Counter(truth), truth - held.keys()
        assert not surplus and not missing, f"surplus: {list(surplus)[:3]}, missing: {list(missing)[:3]}"


def place(medium: str, group: int) -> str:
    """The name of a medium and a group in it; the first group has the medium's own."""
    return f"{medium}/{group}" if group else medium


def media(node: Node, replica: str) -> list[str]:
    """The replica's media, and the groups in them, that hold a copy of this block."""
    return sorted(holder.medium for holder in node.held if holder.replica == replica)


def ancestors(node: Node) -> Iterator[Node]:
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent


def subtree(top: Node) -> Iterator[Node]:
    """The node and all below it, parents before children, the first stored branch first."""
    pending = [top]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(node.children.values())


class Run(NamedTuple):
    nodes: list[Node]
    first: Node
    last: Node
    blocks: int
    tokens: int
    held: tuple[Holder, ...]

    @property
    def packed(self) -> bytes:
        return b"".join(node.packed for node in self.nodes)

    @property
    def extras(self) -> list[ExtraKey]:
        """Images (id, offset in their block) and prompt embeddings that stand in the run."""
        return [extra for node in self.nodes for extra in node.extras]


class Size(NamedTuple):
    """Blocks resident at and below a node, and the branches that end there."""

    blocks: int
    tokens: int
    leaves: int


def run_from(first: Node) -> Run:
    nodes = [first]
    while len(nodes[-1].children) == 1:
        [child] = nodes[-1].children.values()
        if child.held != first.held:
            break
        nodes.append(child)
    return Run(nodes, first, nodes[-1], len(nodes), sum(node.tokens for node in nodes), first.held)


def runs_below(node: Node, sizes: dict[int, Size]) -> list[Run]:
    """The runs that begin right below a node, the largest subtree first."""
    children = sorted(node.children.values(), key=lambda child: sizes[child.key].tokens, reverse=True)
    return [run_from(child) for child in children]


def all_runs(tree: Tree) -> Iterator[tuple[Run, int, int]]:
    """Every run, parents before children, with the blocks and tokens of its prompt that stand before it."""
    pending = [(child, 0, 0) for top in tree.tops() for child in top.children.values()]
    while pending:
        node, blocks, tokens = pending.pop()
        run = run_from(node)
        yield run, blocks, tokens
        blocks, tokens = blocks + run.blocks, tokens + run.tokens
        pending += [(child, blocks, tokens) for child in run.last.children.values()]


def sizes(tree: Tree) -> dict[int, Size]:
    found: dict[int, Size] = {}
    for top in tree.tops():
        for node in reversed(list(subtree(top))):
            below = [found[key] for key in node.children]
            own = bool(node.held)
            found[node.key] = Size(
                own + sum(size.blocks for size in below),
                own * node.tokens + sum(size.tokens for size in below),
                sum(size.leaves for size in below) if below else 1,
            )
    return found


def token_ids(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)
