"""The pool against a dumb model: lists of slots, and contents as whole token prefixes, compared after every call.

The vocabulary has two tokens and a block few of them, so that prefixes really meet. Weak keys (`bits` of them) make
64-bit collisions as common as dust; the model, which compares contents, never falls for one.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from events.blocks import ExtraKey
from events.cache.resolver import Resolver
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.cache.contents import NOT_NAMED
from replica.cache.names import NO_PART, Match, Names, PartialBlock, Slots
from tests.replica.careless import run_careless

MODEL = "model"

# Everything that the KV of a block depends on: LoRA, salt, all tokens from 0, all extra keys so far.
Content: TypeAlias = tuple[str | None, str | None, tuple[int, ...], tuple[tuple[int, object], ...]]

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
loras, salts = (st.sampled_from([None, None, None, "x"]) for _ in range(2))
images: st.SearchStrategy[dict[int, list[ExtraKey]]] = st.sampled_from([{}, {}, {0: [("cat", 0)]}, {1: [b"dog"]}])
indices = st.integers(0, 100)


class Held(NamedTuple):
    """A request: its tokens and its blocks."""

    chain: Chain
    blocks: list[int]

    def content(self, index: int) -> Content:
        own, size = self.chain, self.chain.block_size
        extras = tuple((at, tuple(keys)) for at, keys in sorted(own.extras.items()) if at <= index)
        return own.lora_name, own.cache_salt, tuple(own.tokens[: (index + 1) * size]), extras

    def tail(self, tokens: int) -> Content:
        """The first tokens of the block after the named ones."""
        lora, salt, _, extras = self.content(self.chain.named)
        return lora, salt, tuple(self.chain.tokens[: self.chain.named * self.chain.block_size + tokens]), extras


class Mark(NamedTuple):
    tenant: str | None
    ttl_s: float


class Model:
    """A pool as it would be explained on a blackboard."""

    def __init__(self, num_blocks: int, size: int, limit: int = 0, tenant_limit: int = 0) -> None:
        self.size = size
        self.limit, self.tenant_limit = limit, tenant_limit
        self.marks: dict[int, Mark] = {}
        self.resting: list[tuple[float, int, int]] = []  # deadline, a number that grows, block
        self.rested = 0
        self.now_s = 0.0
        self.tails: dict[int, Content] = {}
        self.queue = list(range(num_blocks))
        self.references = [0] * num_blocks
        self.named: dict[int, tuple[int, Content]] = {}
        self.holders: dict[int, list[int]] = {}  # by key, in the order they were named
        self.evictions = 0
        self.resident: set[int] = set()

    def match(self, request: Held, limit: int) -> list[int]:
        found: list[int] = []
        for index, key in enumerate(request.chain.keys[:limit]):
            holders = self.holders.get(key)
            if not holders or self.named[holders[0]][1] != request.content(index):
                break
            found.append(holders[0])
        return found

    def part(self, request: Held, matched: int, stop: int) -> dict[int, int]:
        """Number of the request's tokens before `stop` in each block that follows the same prefix."""
        own = self.after(request.content(matched), matched)
        tokens = request.chain.tokens[matched * self.size : stop]
        runs: dict[int, int] = {}
        for block, content in {**self.tails, **{block: content for block, (_, content) in self.named.items()}}.items():
            held = content[2][matched * self.size :]
            if 0 < len(held) <= self.size and self.after(content, matched) == own:
                alike = (a == b for a, b in zip(tokens, held, strict=False))
                runs[block] = len(list(takewhile(bool, alike)))
        return {block: run for block, run in runs.items() if run}

    def after(self, content: Content, index: int) -> Content:
        lora, salt, tokens, extras = content
        return lora, salt, tokens[: index * self.size], extras

    def keep_tail(self, request: Held, count: int) -> None:
        chain, index = request.chain, request.chain.named
        self.tails.pop(request.blocks[index], None)
        runs = self.part(request, index, index * self.size + count)
        if count not in runs.values():
            self.tails[request.blocks[index]] = request.tail(count)
        assert chain.named == index

    def take(self, hits: list[int], new: int) -> list[int] | None:
        rest = [block for block in self.free if block not in hits]
        if len(rest) < new:
            return None
        for block in [*hits, *rest[:new]]:
            self.rescue(block)
        for block in rest[:new]:
            self.marks.pop(block, None)
            self.unname(block)
        for block in [*hits, *rest[:new]]:
            self.references[block] += 1
        return [*hits, *rest[:new]]

    def unname(self, block: int) -> None:
        self.tails.pop(block, None)
        if block in self.named:
            self.evictions += 1
            key, _ = self.named.pop(block)
            self.holders[key].remove(block)
            if not self.holders[key]:
                del self.holders[key]

    def store(self, request: Held, start: int, stop: int) -> int:
        """Name blocks; return the index at which naming has to end."""
        for index in range(start, stop):
            key, block = request.chain.keys[index], request.blocks[index]
            holders = self.holders.setdefault(key, [])
            if holders and self.named[holders[0]][1] != request.content(index):
                return index
            holders.append(block)
            self.tails.pop(block, None)
            self.named[block] = key, request.content(index)
        return stop

    def release(self, blocks: Sequence[int], keep: int | None) -> None:
        unnamed: list[int] = []
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block] and block in self.marks:
                self.rested += 1
                self.resting.append((self.now_s + self.marks[block].ttl_s, self.rested, block))
            elif not self.references[block]:
                if keep is not None and block in blocks[keep:]:
                    self.unname(block)
                (self.queue if block in self.named or block in self.tails else unnamed).append(block)
        self.queue = unnamed + self.queue

    @property
    def free(self) -> list[int]:
        return [*self.queue, *(block for *_, block in sorted(self.resting))]

    def rescue(self, block: int) -> None:
        if block in self.queue:
            self.queue.remove(block)
        self.resting = [rest for rest in self.resting if rest[-1] != block]

    def retain(self, blocks: Iterable[int], tenant: str | None, ttl_s: float) -> None:
        for block in blocks:
            if block in self.marks:
                self.marks[block] = Mark(tenant, max(ttl_s, self.marks[block].ttl_s))
            elif self.has_room_to_mark(tenant, self.now_s + ttl_s):
                self.marks[block] = Mark(tenant, ttl_s)
            else:
                return

    def has_room_to_mark(self, tenant: str | None, before_s: float) -> bool:
        own = [block for block, mark in self.marks.items() if mark.tenant == tenant]
        if len(self.marks) < self.limit and len(own) < self.tenant_limit:
            return True
        oldest = min((rest for rest in self.resting if rest[-1] in own and rest[0] < before_s), default=None)
        if oldest is not None:
            self.let_go(oldest)
        return oldest is not None

    def let_go(self, rest: tuple[float, int, int]) -> None:
        """Let a resting block be one like any other."""
        self.resting.remove(rest)
        del self.marks[rest[-1]]
        self.queue.append(rest[-1])

    def expire(self, now_s: float) -> None:
        self.now_s = now_s
        for rest in sorted(self.resting):
            if rest[0] <= now_s:
                self.let_go(rest)


class World(RuleBasedStateMachine):
    """Requests that come, compute in pieces, grow, are preempted, come back, and end."""

    pool_type: type[BlockPool] = BlockPool
    weak = False

    @initialize(
        num_blocks=st.integers(1, 12),
        size=st.integers(1, 4),
        bits=st.integers(1, 4),
        at_once=st.booleans(),
        partial=st.booleans(),
        limits=st.sampled_from([(0, 0), (3, 1), (5, 3), (12, 12)]),
    )
    def begin(
        self, num_blocks: int, size: int, bits: int, at_once: bool, partial: bool, limits: tuple[int, int]
    ) -> None:
        limit, tenant_limit = limits
        self.pool = self.pool_type(
            num_blocks, size, partial=partial, retained_blocks=limit, retained_per_tenant=tenant_limit
        )
        self.pool.retention.at_once = 1
        self.model = Model(num_blocks, size, limit, tenant_limit)
        self.mask = (1 << bits) - 1 if self.weak else 2**64 - 1
        self.at_once = at_once
        self.requests: list[Held] = []
        self.preempted: list[Held] = []
        self.past: list[Chain] = []
        self.told: set[int] = set()
        self.resolver = Resolver(MODEL, native=not self.weak)

    def weaken(self, chain: Chain) -> None:
        if self.weak:
            chain.keys[:] = array("Q", [key & self.mask for key in chain.keys])

    # ---- requests

    @rule(tokens=tokens, lora_name=loras, cache_salt=salts, extras=images)
    def admit(self, tokens: list[int], **own: Any) -> None:
        self.arrive(tokens, **own)

    @precondition(lambda self: self.past)
    @rule(which=indices, more=st.lists(st.integers(0, 1), max_size=8))
    def admit_a_continuation(self, which: int, more: list[int]) -> None:
        """Admit a continued or repeated conversation: the usual way to share a prefix."""
        other = self.past[which % len(self.past)]
        same = {name: getattr(other, name) for name in ("lora_name", "cache_salt", "extras")}
        self.arrive([*other.tokens, *more][:30], **same)

    @rule(tokens=tokens, more=st.lists(st.integers(0, 1), max_size=4))
    def twins_compute_the_same_at_the_same_time(self, tokens: list[int], more: list[int]) -> None:
        """Make copies in the usual way; one of the two prompts is a little longer than the other."""
        before = len(self.requests)
        for text in (tokens, [*tokens, *more]):
            self.arrive(text)
        for request in self.requests[before:]:
            self.fill(request, 100)

    def arrive(self, tokens: list[int], **own: Any) -> None:
        chain = Chain(tokens, self.pool.block_size, MODEL, **own)
        self.weaken(chain)
        self.start(Held(chain, []))

    def start(self, request: Held) -> None:
        chain, size = request.chain, self.pool.block_size
        match = self.pool.match(chain)
        assert match.blocks == self.model.match(request, (len(chain) - 1) // size)
        hits = match.blocks + self.adopted(request, match)
        new = -(-len(chain) // size) - len(hits)
        others = [block for block in self.pool.free_queue() if block not in hits]
        blocks = self.pool.take(hits, new)
        assert blocks == self.model.take(hits, new)
        assert (blocks is not None) == (len(others) >= new)
        if blocks is None:
            return
        assert blocks == hits + others[:new]
        request.blocks[:] = blocks
        self.past.append(chain)
        chain.named, chain.identity = len(match.blocks), match.identity
        self.requests.append(request)

    def adopted(self, request: Held, match: Match) -> list[int]:
        """The block that holds a part and nothing more; verifies that no block holds a longer part."""
        part = self.pool.part(request.chain, match)
        runs = self.model.part(request, len(match.blocks), len(request.chain) - 1) if self.pool.partial else {}
        assert part.tokens == max(runs.values(), default=0)
        assert part.source in runs or part == NO_PART
        ends = len(match.blocks) * self.pool.block_size + part.tokens
        is_all = part.source in self.model.tails and len(self.model.tails[part.source][2]) == ends
        assert part.adoptable == (is_all and not self.model.references[part.source])
        return [part.source] if part.adoptable else []

    @precondition(lambda self: self.requests)
    @rule(which=indices, count=st.integers(1, 3))
    def keep_a_tail(self, which: int, count: int) -> None:
        """Keep the computed part of the block after the named ones, for others to find."""
        self.keep(self.requests[which % len(self.requests)], count)

    def keep(self, request: Held, count: int) -> None:
        chain, size = request.chain, self.pool.block_size
        count = min(count, size - 1, min(len(chain), len(request.blocks) * size) - chain.named * size)
        self.pool.keep_tail(chain, request.blocks, chain.named * size + count)
        if self.pool.partial and chain.identity is not None and count > 0:
            self.model.keep_tail(request, count)

    @precondition(lambda self: self.requests)
    @rule(which=indices, count=st.integers(1, 8))
    def compute(self, which: int, count: int) -> None:
        """Fill some more blocks, and name them: one after the other, or all at once."""
        self.fill(self.requests[which % len(self.requests)], count)

    def fill(self, request: Held, count: int) -> None:
        chain, start = request.chain, request.chain.named
        if chain.identity is None:
            self.pool.store(chain, request.blocks, len(chain.keys))
            assert (chain.named, chain.identity) == (start, None)
            return
        stop = min(start + count, len(chain.keys), len(request.blocks))
        expected = self.model.store(request, start, stop)
        for end in [stop] if self.at_once else range(start + 1, stop + 1):
            self.pool.store(chain, request.blocks, end)
        assert chain.named == expected
        assert (chain.identity is None) == (expected < stop)

    @precondition(lambda self: self.requests)
    @rule(which=indices, more=tokens)
    def grow(self, which: int, more: list[int]) -> None:
        request = self.requests[which % len(self.requests)]
        for token in more:
            if len(request.chain) == len(request.blocks) * self.pool.block_size:
                blocks = self.pool.take((), 1)
                assert blocks == self.model.take([], 1)
                if blocks is None:
                    return
                request.blocks.extend(blocks)
            request.chain.append(token)
            self.weaken(request.chain)

    @precondition(lambda self: self.requests)
    @rule(which=indices)
    def compute_all_and_end(self, which: int) -> None:
        request = self.requests[which % len(self.requests)]
        self.fill(request, 100)
        self.keep(request, 100)
        self.stop(which)

    @precondition(lambda self: self.requests)
    @rule(which=indices)
    def end(self, which: int) -> None:
        self.stop(which)

    @precondition(lambda self: self.requests)
    @rule(which=indices, keep=st.integers(0, 8))
    def compute_all_and_end_for_good(self, which: int, keep: int) -> None:
        self.fill(self.requests[which % len(self.requests)], 100)
        self.stop(which, keep)

    def stop(self, which: int, keep: int | None = None) -> Held:
        request = self.requests.pop(which % len(self.requests))
        self.pool.release(request.blocks, keep)
        self.model.release(request.blocks, keep)
        return request

    @precondition(lambda self: self.requests)
    @rule(which=indices)
    def preempt(self, which: int) -> None:
        request = self.stop(which)
        request.blocks.clear()
        request.chain.named, request.chain.identity = 0, 0
        self.preempted.append(request)

    @precondition(lambda self: self.preempted)
    @rule()
    def come_back(self) -> None:
        self.start(self.preempted.pop(0))

    # ---- retention

    @precondition(lambda self: self.requests)
    @rule(which=indices, count=st.integers(0, 8), ttl_s=st.sampled_from([3.0, 10.0]))
    def retain_and_end(self, which: int, count: int, ttl_s: float) -> None:
        request = self.requests[which % len(self.requests)]
        self.fill(request, 100)
        self.retain(request, count, ttl_s)
        self.stop(which)

    def retain(self, request: Held, count: int, ttl_s: float) -> None:
        blocks = request.blocks[: min(count, request.chain.named)]
        self.pool.retain(blocks, request.chain.cache_salt, ttl_s)
        self.model.retain(blocks, request.chain.cache_salt, ttl_s)

    @rule(most=st.integers(0, 12))
    def a_neighbour_asks_for_the_hottest_prefixes(self, most: int) -> None:
        keys = [key for chain in self.pool.hottest(most, MODEL) for key in chain.keys]
        assert len(set(keys)) <= most
        assert self.weak or self.pool.resident().issuperset(keys)

    @rule(seconds=st.sampled_from([1, 5, 20]))
    def time_passes(self, seconds: int) -> None:
        self.pool.expire(self.model.now_s + seconds)
        self.model.expire(self.model.now_s + seconds)

    @rule()
    def reset(self) -> None:
        done = not any(self.model.references)
        assert self.pool.reset() == done
        if done:
            self.model.named.clear()
            self.model.tails.clear()
            self.model.holders.clear()
            self.model.queue += [block for *_, block in sorted(self.model.resting)]
            self.model.marks.clear()
            self.model.resting.clear()

    # ---- invariants

    @invariant()
    def pool_equals_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        pool, model = self.pool, self.model
        pool.check()
        assert list(pool.free_queue()) == model.free
        assert [pool.references(block) for block in range(pool.num_blocks)] == model.references
        assert pool.resident() == {key for key, holders in model.holders.items() if holders}
        for block in range(pool.num_blocks):
            tail = len(model.tails[block][2]) - 1 if block in model.tails else -1  # the index of its last token
            expected = pool.block_size if block in model.named else tail % pool.block_size + 1 if tail >= 0 else 0
            assert pool.findable_tokens(block) == expected
        snapshot = pool.snapshot()
        assert snapshot.cached == len(model.named)
        assert snapshot.free == len(model.free) == pool.num_blocks - snapshot.referenced
        assert snapshot.unreferenced == len(model.named.keys() & set(model.free))
        assert snapshot.retained == len(model.marks)
        assert snapshot.evictions == model.evictions
        assert self.weak or snapshot.collisions_refused == 0
        self.hear()

    def hear(self) -> None:
        """Check that the events report the resident keys, each once."""
        events = self.pool.take_events()
        for event in events:
            if isinstance(event, BlockStored):
                assert self.told.isdisjoint(keys_of(event))
                self.told |= keys_of(event)
            elif isinstance(event, BlockRemoved):
                assert self.told >= keys_of(event)
                self.told -= keys_of(event)
            else:
                assert event == AllBlocksCleared()
                self.told.clear()
        assert self.told == self.pool.resident()
        if not self.weak:  # a consumer of its own would work out other keys than the weak ones
            self.resolver.apply(events)
            assert self.resolver.lost is None
            assert self.resolver.keys() == self.told


def keys_of(event: BlockStored | BlockRemoved) -> set[int]:
    keys = {key for key in event.block_hashes if isinstance(key, int)}
    assert len(keys) == len(event.block_hashes)
    return keys


class WeakWorld(World):
    """Every other key is a collision."""

    weak = True


TestPool = World.TestCase
TestPoolWithCollisions = WeakWorld.TestCase


# ---- negative controls: each leaves out one precaution, and the property must notice


class Trusting(BlockPool):
    """Believes that a key decides alone."""

    def match(self, chain: Chain) -> Match:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._contents, "count_same", lambda _, slots: len(slots))
            return super().match(chain)


class Doubling(BlockPool):
    """Counts a hit that waits in the free queue as room, too."""

    def take(self, hits: Sequence[int], new: int) -> list[int] | None:
        if self.free < new:
            return None
        self.touch(hits)
        blocks = super().take((), min(new, self.free))
        return None if blocks is None else [*hits, *blocks]


class ForgetfulNames(Names):
    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool.num_blocks)
        self._contents = pool._contents

    def drop_copy(self, slot: int) -> bool:
        key = self.keys[slot]
        if self.find(key) != slot:
            return key not in self.copies or super().drop_copy(slot)
        for copy in self.copies.pop(key, []):
            self._contents.parent[copy], self._contents.filled[copy] = NOT_NAMED, 0
        return False


class Forgetful(BlockPool):
    """Removes a name with its first copy."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._names = ForgetfulNames(self)


class Blind(BlockPool):
    """Finds parts in other tenants' blocks."""

    def part(self, chain: Chain, match: Match) -> PartialBlock:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._contents, "exact", {})
            patch.setattr(chain, "exact", {})
            return super().part(chain, match)


class Undying(BlockPool):
    """Finds tails whose slot has been handed out."""

    def _evict(self, slots: Slots, *, keep: bool = True) -> None:  # noqa: ARG002
        super()._evict(slots[self._contents.is_full(slots)])


class Hoarding(BlockPool):
    """A pool that keeps every tail, even duplicates."""

    def keep_tail(self, chain: Chain, blocks: Sequence[int], computed: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._contents, "longest_run", lambda *_: (0, 0))
            super().keep_tail(chain, blocks, computed)


class Unfair(BlockPool):
    """Retains all prefixes as those of one tenant."""

    def retain(self, blocks: Sequence[int], tenant: str | None, ttl_s: float) -> None:  # noqa: ARG002
        super().retain(blocks, None, ttl_s)


class Eternal(BlockPool):
    """Never ends a retention."""

    def expire(self, now_s: float) -> None:
        self.retention.now_s = now_s


class Unkind(BlockPool):
    """Gives retained blocks up first."""

    def take(self, hits: Sequence[int], new: int) -> list[int] | None:
        self._queue.prepend(self.retention.end(self.retention.first_to_go(new)))
        return super().take(hits, new)


@pytest.mark.parametrize(
    ("world", "broken"),
    [
        (World, Doubling),
        (World, Unkind),
        pytest.param(WeakWorld, Trusting, marks=pytest.mark.grid),
        *(
            pytest.param(World, broken, marks=pytest.mark.grid)
            for broken in (Forgetful, Blind, Undying, Hoarding, Unfair, Eternal)
        ),
    ],
    ids=lambda of: of.__name__,
)
def test_the_property_fails_for_a_pool_that_leaves_out_a_precaution(
    world: type[World], broken: type[BlockPool]
) -> None:
    with pytest.raises(AssertionError):
        run_careless(world, pool_type=broken)
