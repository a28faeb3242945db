"""The resolver against a dumb model: dicts of counts, and the true key of each hash."""

from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from events.blocks import block_keys, root_key
from events.cache.changes import Change, Cleared, Grouped, Removed, Stored
from events.cache.resolver import Resolver
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash
from tests.events.resident import copies as resident_copies

MODEL = "model"
SIZE = 2
ROOT = root_key(MODEL, block_size=SIZE)
NODES = 10
POOLS = [("GPU", 0), ("GPU", 1), ("CPU", 0)]
PARTIAL = ("GPU", 2)
WINDOW = 3  # of the partial group: a block
KINDS = ("full_attention", "full_attention", "sliding_window")

Pool = tuple[str, int]
pools = st.sampled_from(POOLS)
nodes = st.integers(0, NODES - 1)
# An engine that salts its hashes without saying so gives two names to one text.
variants = st.integers(0, 1)


class Waiting(NamedTuple):
    """Hashes that get their key in this pool once the key of another is known."""

    pool: Pool
    hashes: list[Hash]


class Model:
    """A replica's blocks, and which of them can be named; written as plainly as possible."""

    def __init__(self) -> None:
        self.copies: dict[Pool, Counter[Hash]] = {pool: Counter() for pool in [*POOLS, PARTIAL]}
        self.named: dict[Pool, set[Hash]] = {pool: set() for pool in self.copies}
        self.waiting: dict[Hash, list[Waiting]] = {}

    def add(self, pool: Pool, hashes: list[Hash]) -> None:
        self.copies[pool].update(hashes)

    def known(self, block_hash: Hash | None) -> bool:
        return block_hash is None or any(block_hash in named for named in self.named.values())

    def store(self, pool: Pool, hashes: list[Hash], parent: Hash | None) -> None:
        self.add(pool, hashes)
        if parent is None or self.known(parent):
            self.name(Waiting(pool, hashes))
        else:
            self.waiting.setdefault(parent, []).append(Waiting(pool, hashes))

    def store_by_hash_alone(self, pool: Pool, hashes: list[Hash]) -> None:
        self.add(pool, hashes)
        for block_hash in hashes:
            if self.known(block_hash):
                self.named[pool].add(block_hash)
            else:
                self.waiting.setdefault(block_hash, []).append(Waiting(pool, [block_hash]))

    def name(self, found: Waiting) -> None:
        self.named[found.pool].update(block_hash for block_hash in found.hashes if self.copies[found.pool][block_hash])
        for block_hash in found.hashes:
            for waiting in self.waiting.pop(block_hash, []):
                self.name(waiting)

    def remove(self, pool: Pool, hashes: list[Hash]) -> None:
        for block_hash in hashes:
            if self.copies[pool][block_hash] > 0:
                self.copies[pool][block_hash] -= 1
            if not self.copies[pool][block_hash]:
                self.named[pool].discard(block_hash)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


class Follower:
    """A consumer that sees nothing but changes."""

    def __init__(self) -> None:
        self.keys: dict[Pool, set[int]] = {}

    def follow(self, change: Change) -> None:
        if isinstance(change, Cleared):
            self.keys.clear()
            return
        if isinstance(change, Grouped):
            return
        held = self.keys.setdefault((change.medium, change.group), set())
        if isinstance(change, Stored):
            assert held.isdisjoint(change.keys), "a key was reported as stored twice"
            assert set(change.keys) <= set(change.chain)
            held.update(change.keys)
        else:
            assert isinstance(change, Removed)
            assert held.issuperset(change.keys), "an unknown key was reported as removed"
            held.difference_update(change.keys)
        assert len(change.keys) == len(set(change.keys))


class World(RuleBasedStateMachine):
    """Random blocks of a random tree, stored and removed in any order on several media and groups."""

    keeps_orphans = True  # the negative control turns this off

    @initialize(
        parents=st.lists(st.integers(0, 100), min_size=NODES, max_size=NODES),
        tokens=st.lists(st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE), min_size=NODES, max_size=NODES),
        as_bytes=st.booleans(),
    )
    def grow(self, parents: list[int], tokens: list[list[int]], as_bytes: bool) -> None:
        """Node 0 to 2 start at the root; any other follows an earlier one. Equal texts get equal keys."""
        self.parents = [None if node < 3 else parents[node] % node for node in range(NODES)]
        self.tokens = tokens
        self.as_bytes = as_bytes
        self.model = Model()
        self.follower = Follower()
        self.resolver = Resolver(MODEL, orphan_limit=1000)
        for group in range(3):
            self.stored(("GPU", group), [], None, [])
        self.truth: dict[Hash, int] = {}
        for node in range(NODES):
            text = [token for at in self.path(node) for token in self.tokens[at]]
            for variant in (0, 1):
                self.truth[self.hash(node, variant)] = block_keys(text, SIZE, ROOT)[-1]

    def path(self, node: int) -> list[int]:
        parent = self.parents[node]
        return [*(self.path(parent) if parent is not None else []), node]

    def hash(self, node: int, variant: int) -> Hash:
        number = 1000 + 2 * node + variant
        return number.to_bytes(32) if self.as_bytes else number

    def run(self, node: int, length: int, variant: int) -> tuple[list[int], list[Hash], Hash | None]:
        """Up to `length` blocks that end in this one, their hashes, and the hash they follow."""
        path = self.path(node)
        blocks = path[-length:]
        before = path[-length - 1] if len(path) > length else None
        return blocks, [self.hash(at, variant) for at in blocks], None if before is None else self.hash(before, variant)

    def apply(self, event: Event) -> None:
        for change in self.resolver.apply([event]):
            self.follower.follow(change)

    def stored(self, pool: Pool, hashes: list[Hash], parent: Hash | None, tokens: list[int], **more: Any) -> None:
        values = {"block_size": SIZE, "lora_id": None, "medium": pool[0], "lora_name": None, "group_idx": pool[1]}
        if pool[0] == "GPU":
            values |= {"kv_cache_spec_kind": KINDS[pool[1]], "kv_cache_spec_sliding_window": WINDOW}
        self.apply(BlockStored(hashes, parent, tokens, **{**values, **more}))

    # ---- what the engine says

    @rule(pool=pools, node=nodes, length=st.integers(1, 4), variant=variants)
    def store(self, pool: Pool, node: int, length: int, variant: int) -> None:
        blocks, hashes, parent = self.run(node, length, variant)
        self.model.store(pool, hashes, parent)
        if self.keeps_orphans or parent is None or self.model.known(parent):
            self.stored(pool, hashes, parent, [token for at in blocks for token in self.tokens[at]])

    @rule(pool=pools, chosen=st.lists(st.tuples(nodes, variants), min_size=1, max_size=4))
    def store_by_hash_alone(self, pool: Pool, chosen: list[tuple[int, int]]) -> None:
        hashes = [self.hash(node, variant) for node, variant in chosen]
        self.model.store_by_hash_alone(pool, hashes)
        self.stored(pool, hashes, None, [], block_size=0)

    @rule(pool=pools, node=nodes, variant=variants, tokens=st.integers(1, 5).filter(lambda count: count != SIZE))
    def store_with_tokens_of_other_blocks(self, pool: Pool, node: int, variant: int, tokens: int) -> None:
        _, hashes, parent = self.run(node, 1, variant)
        self.model.store_by_hash_alone(pool, hashes)
        self.stored(pool, hashes, parent, [1] * tokens)

    @rule(node=nodes, length=st.integers(1, 4), variant=variants)
    def store_in_a_group_that_keeps_part_of_a_prefix(self, node: int, length: int, variant: int) -> None:
        blocks, hashes, parent = self.run(node, length, variant)
        self.model.store(PARTIAL, hashes, parent)
        if self.keeps_orphans or parent is None or self.model.known(parent):
            self.stored(PARTIAL, hashes, parent, [token for at in blocks for token in self.tokens[at]])

    @rule(pool=st.sampled_from([*POOLS, PARTIAL]), chosen=st.lists(st.tuples(nodes, variants), min_size=1, max_size=6))
    def remove(self, pool: Pool, chosen: list[tuple[int, int]]) -> None:
        hashes = [self.hash(node, variant) for node, variant in chosen]
        self.model.remove(pool, hashes)
        self.apply(BlockRemoved(hashes, *pool))

    @rule(pool=pools, node=nodes, variant=variants)
    def remove_a_block_but_not_its_descendants(self, pool: Pool, node: int, variant: int) -> None:
        hashes = [self.hash(node, variant)] * (1 + self.model.copies[pool][self.hash(node, variant)])
        self.model.remove(pool, hashes)
        self.apply(BlockRemoved(hashes, *pool))

    @rule(one_in_ten=st.integers(0, 9))
    def clear(self, one_in_ten: int) -> None:
        if one_in_ten == 0:
            self.model.clear()
            self.apply(AllBlocksCleared())

    # ---- what must hold

    @invariant()
    def resolver_equals_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        self.resolver.check()
        copies = {pool: dict(+count) for pool, count in self.model.copies.items() if +count}
        assert resident_copies(self.resolver) == copies
        assert self.resolver.resident_blocks() == sum(map(len, copies.values()))
        assert self.resolver.lost is None
        for medium in ("GPU", "CPU"):
            keys = {self.truth[h] for pool, named in self.model.named.items() if pool[0] == medium for h in named}
            assert self.resolver.keys(medium) == keys
            assert set().union(*(held for pool, held in self.follower.keys.items() if pool[0] == medium)) == keys
        groups = [{self.truth[h] for h in self.model.named["GPU", group]} for group in range(3)]
        for node in range(NODES):
            path = [self.truth[self.hash(at, 0)] for at in self.path(node)]
            hits = [
                end
                for end in range(1, len(path) + 1)
                if groups[0].issuperset(path[:end]) and groups[1].issuperset(path[:end]) and path[end - 1] in groups[2]
            ]
            assert self.resolver.matched(path) == max(hits, default=0)


class WorldWithoutOrphans(World):
    keeps_orphans = False


TestResolver = World.TestCase


# The same examples always: by chance it would now and then miss what is broken.
NEGATIVE = settings(max_examples=2000, phases=(Phase.generate,), database=None, derandomize=True)


def test_the_property_fails_for_a_resolver_that_does_less() -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(WorldWithoutOrphans, settings=NEGATIVE)
