"""The prefix tree against nested dicts, and its display."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from events.analysis.tree import (
    Holder,
    Namespace,
    Node,
    Tree,
    ancestors,
    media,
    run_from,
    runs_below,
    sizes,
    token_ids,
)
from events.blocks import block_keys, pack_tokens, root_key
from events.cache.resolver import Resolver
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash
from events.tool.verify import OTHER_MEDIA, compare

SIZE = 2
Path = tuple[int, ...]  # block i of a prompt is the tokens (path[i], path[i])
REPLICAS = ("foreign", "other", "native")


class Cache:
    """One replica: its resolver feeds the tree."""

    def __init__(self, tree: Tree, name: str = "foreign") -> None:
        self.tree = tree
        self.name = name
        self.native = name == "native"
        self.resolver = Resolver(native=self.native)

    def hash_of(self, prompt: Path, salt: str | None = None) -> Hash:
        keys = block_keys(tokens_of(prompt), SIZE, root_key("", None, salt, SIZE))
        return keys[-1] if self.native else hash((self.name, salt, prompt)) & (2**64 - 1)

    def stored(self, prompt: Path, start: int = 0, medium: str = "GPU", salt: str | None = None) -> BlockStored:
        hashes = [self.hash_of(prompt[: end + 1], salt) for end in range(start, len(prompt))]
        parent = self.hash_of(prompt[:start], salt) if start else None
        return BlockStored(
            hashes, parent, tokens_of(prompt[start:]), SIZE, None, medium, None, cache_salt=None if start else salt
        )

    def removed(self, prompt: Path, medium: str = "GPU", salt: str | None = None) -> BlockRemoved:
        return BlockRemoved([self.hash_of(prompt, salt)], medium)

    def apply(self, *events: Event, at_s: float = 0.0) -> None:
        self.tree.apply(self.name, self.resolver.apply(events), at_s)

    def store(self, *prompts: Path, at_s: float = 0.0) -> None:
        self.apply(*(self.stored(prompt) for prompt in prompts), at_s=at_s)


def tokens_of(prompt: Path) -> list[int]:
    return [token for block in prompt for token in (block, block)]


def node_of(tree: Tree, prompt: Path, salt: str | None = None) -> Node:
    return tree.nodes[block_keys(tokens_of(prompt), SIZE, root_key("", None, salt, SIZE))[-1]]


def path(node: Node) -> list[Node]:
    """The blocks from the top (left out) down to this one."""
    return list(ancestors(node))[-2::-1]


def nested(node: Node) -> dict[bytes, Any]:
    return {child.packed: (Counter(child.held), nested(child)) for child in node.children.values()}


Where = tuple[str, str | None, Path, str]  # replica, salt, prompt, medium


class Model:
    """Copies by place, and the nested dicts that follow from them."""

    def __init__(self) -> None:
        self.copies: Counter[Where] = Counter()

    def nested(self, salt: str | None) -> dict[bytes, Any]:
        top: dict[bytes, Any] = {}
        for replica, own_salt, prompt, medium in self.copies:
            if own_salt == salt:
                below = top
                for block in prompt:
                    held, inner = below.setdefault(pack_tokens([block] * SIZE), (Counter(), {}))
                    below = inner
                held[Holder(replica, medium)] = 1
        return top

    def knows(self, replica: str, salt: str | None, prompt: Path) -> bool:
        """A foreign replica's child can be named only below a resident parent; a native one's below any in the tree."""
        native = replica == "native"
        return any(
            own_salt == salt and (own_prompt[: len(prompt)] == prompt if native else own_prompt == prompt)
            for own_replica, own_salt, own_prompt, _ in self.copies
            if native or own_replica == replica
        )


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


class TreeMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.tree = Tree()
        self.caches = {name: Cache(self.tree, name) for name in REPLICAS}
        self.model = Model()
        for name, cache in self.caches.items():  # a native replica proves on its first chain that its hashes are keys
            cache.store((9,))
            self.model.copies[name, None, (9,), "GPU"] += 1

    @rule(
        name=st.sampled_from(REPLICAS),
        prompt=prompts,
        start=st.integers(0, 4),
        medium=st.sampled_from(["GPU", "CPU"]),
        salt=st.sampled_from([None, "s"]),
    )
    def store(self, name: str, prompt: Path, start: int, medium: str, salt: str | None) -> None:
        start = min(start, len(prompt) - 1)
        while start and not self.model.knows(name, salt, prompt[:start]):
            start -= 1
        self.caches[name].apply(self.caches[name].stored(prompt, start, medium, salt))
        for end in range(start, len(prompt)):
            self.model.copies[name, salt, prompt[: end + 1], medium] += 1

    @rule(prompt=prompts.filter(lambda prompt: len(prompt) > 1), cut=st.integers(1, 4))
    def store_child_before_parent(self, prompt: Path, cut: int) -> None:
        cut = min(cut, len(prompt) - 1)
        if self.model.knows("other", None, prompt[:cut]):
            return
        cache = self.caches["other"]
        cache.apply(cache.stored(prompt, cut))
        self.tree.check(self.resolvers)
        cache.apply(cache.stored(prompt[:cut]))
        for end in range(len(prompt)):
            self.model.copies["other", None, prompt[: end + 1], "GPU"] += 1

    @precondition(lambda self: self.model.copies)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(sorted(self.model.copies, key=repr)))
        replica, salt, prompt, medium = where
        self.caches[replica].apply(self.caches[replica].removed(prompt, medium, salt))
        self.model.copies[where] -= 1
        self.model.copies += Counter()

    @rule(name=st.sampled_from(REPLICAS))
    def clear(self, name: str) -> None:
        self.caches[name].apply(AllBlocksCleared())
        self.model.copies = Counter({where: n for where, n in self.model.copies.items() if where[0] != name})

    @property
    def resolvers(self) -> dict[str, Resolver]:
        return {name: cache.resolver for name, cache in self.caches.items()}

    @invariant()
    def the_tree_is_the_model(self) -> None:
        self.tree.check(self.resolvers)
        tops = {top.namespace: nested(top) for top in self.tree.tops()}
        for salt in (None, "s"):
            assert tops.pop(Namespace(None, salt, SIZE), {}) == self.model.nested(salt)
        assert not tops

    @invariant()
    def sizes_add_up(self) -> None:
        found = sizes(self.tree)
        held = sum(bool(node.held) for node in self.tree.nodes.values())
        assert sum(found[top.key].blocks for top in self.tree.tops()) == held
        assert all(found[top.key].leaves >= 1 for top in self.tree.tops())

    @invariant()
    def comparing_finds_what_only_one_has(self) -> None:
        held = {name: {key for key, node in self.tree.nodes.items() if media(node, name)} for name in REPLICAS}
        found = compare(self.tree, "foreign", "other")
        assert found.shared_blocks == len(held["foreign"] & held["other"])
        assert found.only("foreign")[0] == len(held["foreign"] - held["other"])
        assert found.only("other")[0] == len(held["other"] - held["foreign"])


TestTreeAgainstNestedDicts = TreeMachine.TestCase
TestTreeAgainstNestedDicts.settings = settings(stateful_step_count=30, deadline=None)


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_nodes_of_removed_blocks_are_freed(tree: Tree) -> None:
    cache = Cache(tree)
    cache.store((1, 2, 3))
    cache.apply(cache.stored((1, 5), 1))
    gone = weakref.ref(node_of(tree, (1, 2, 3)))
    gc.disable()
    try:
        cache.apply(cache.removed((1, 2, 3)))
        assert gone() is None
    finally:
        gc.enable()
    cache.apply(cache.removed((1, 2)), cache.removed((1,)), cache.removed((1, 5)))
    assert not tree.nodes


def test_a_removed_block_stays_while_a_descendant_is_resident(tree: Tree) -> None:
    cache = Cache(tree)
    cache.store((1, 2, 3))
    cache.apply(cache.removed((1, 2)))
    gap = node_of(tree, (1, 2))
    assert not gap.held
    assert gap.children
    cache.apply(cache.stored((1, 2), 1))
    assert node_of(tree, (1, 2)) is gap
    assert gap.held
    tree.check({"foreign": cache.resolver})


def test_a_parent_removed_while_it_waited_is_kept_for_its_child(tree: Tree) -> None:
    cache = Cache(tree)
    cache.apply(cache.stored((1, 2, 3), 2), cache.stored((1, 2), 1), cache.removed((1, 2)))
    assert not tree.nodes
    cache.store((1,))
    assert [bool(node.held) for node in path(node_of(tree, (1, 2, 3)))] == [True, False, True]
    tree.check({"foreign": cache.resolver})


def test_a_native_child_of_an_unknown_parent_is_detached_until_the_parent_comes(tree: Tree) -> None:
    cache = Cache(tree, "native")
    cache.store((9,))
    cache.apply(cache.stored((1, 2, 3), 2))
    [_, top] = tree.tops()
    assert top.detached
    assert not top.held
    cache.store((1, 2))
    assert [node.tokens for node in path(node_of(tree, (1, 2, 3)))] == [2, 2, 2]
    assert not [top for top in tree.tops() if top.detached]
    tree.check({"native": cache.resolver})


def test_a_native_replica_that_names_a_block_as_its_own_parent_makes_no_cycle(tree: Tree) -> None:
    cache = Cache(tree, "native")
    cache.apply(BlockStored([5], 5, [1, 1], SIZE, None, "GPU", None))
    cache.apply(BlockStored([6], 7, [1, 1], SIZE, None, "GPU", None))
    cache.apply(BlockStored([7], 6, [1, 1], SIZE, None, "GPU", None))
    tree.check({"native": cache.resolver})
    assert sizes(tree)[5].blocks == 1


def test_a_tier_that_sends_no_tokens_marks_known_blocks(tree: Tree) -> None:
    cache = Cache(tree)
    disk = BlockStored([cache.hash_of((1, 2))], None, [], SIZE, None, "DISK", None)
    cache.apply(disk)
    assert not tree.nodes
    cache.store((1, 2))
    assert media(node_of(tree, (1, 2)), "foreign") == ["DISK", "GPU"]
    tree.check({"foreign": cache.resolver})


def test_images_stand_in_their_block(tree: Tree) -> None:
    cache = Cache(tree)
    cache.apply(
        BlockStored([1, 2], None, [1, 1, 2, 2], SIZE, None, "GPU", "lora", extra_keys=[["lora"], ["lora", ["cat", -1]]])
    )
    [top] = tree.tops()
    assert top.namespace == Namespace("lora", None, SIZE)
    first, second = path(next(node for node in tree.nodes.values() if node.extras))
    assert (first.extras, second.extras) == ((), (("cat", -1),))


def test_a_run_ends_where_the_prompts_part_and_where_the_holders_change(tree: Tree) -> None:
    cache = Cache(tree)
    cache.store((1, 2, 3), (1, 2, 4, 5, 6))
    trunk = run_from(node_of(tree, (1,)))
    assert token_ids(trunk.packed) == (1, 1, 2, 2)
    found = sizes(tree)
    assert [run.blocks for run in runs_below(trunk.last, found)] == [3, 1]
    assert found[trunk.first.key] == (6, 12, 2)
    cache.apply(cache.removed((1, 2, 4, 5, 6)), cache.stored((1, 2, 4, 5, 6), 4, "CPU"))
    assert [run.blocks for run in runs_below(trunk.last, sizes(tree))] == [2, 1]


def test_a_deep_chain_needs_no_recursion(tree: Tree) -> None:
    cache = Cache(tree)
    hashes: list[Hash] = list(range(1, 20_001))
    cache.apply(BlockStored(hashes, None, [1] * (20_000 * SIZE), SIZE, None, "GPU", None))
    tree.check({"foreign": cache.resolver})
    cache.apply(AllBlocksCleared())
    assert not tree.nodes


def test_blocks_that_two_replicas_hold_in_different_media_are_reported_so(tree: Tree) -> None:
    here, there = Cache(tree), Cache(tree, "other")
    here.store((1, 2))
    there.apply(there.stored((1,)), there.stored((1, 2), 1, "CPU"))
    found = compare(tree, "foreign", "other")
    assert not found.equal
    assert [(part.side, part.blocks) for part in found.parts] == [(OTHER_MEDIA, 1)]
