"""The blocks of KV memory: which are free, which hold a known prefix, and who uses them.

A block is in one of three states, and two events move it:

    free              unnamed, no reference     at the front of the free queue
    live              referenced                not in the queue; named as soon as it is full
    cached and free   named, no reference       in the queue, least recently used first

    take      free -> live, cached and free -> live: as a hit it keeps its name, as a new block it loses it (eviction)
    release   live -> cached and free if it is named, live -> free if not

Eviction is lazy: a released block can be found until its slot is handed out. The pool decides and says what happened as
events; it sends nothing, and knows neither requests nor time.

A name is the block's key (`events.blocks`), and it never decides alone. A named block has an identity, a number given
to its content (tokens and extra keys from the start of the chain) and to no other content ever; a hit must have the
prompt's own tokens and extra keys, and a parent with the identity of the block before it. All copies of one content
share the identity, so a copy may be evicted or recycled without making the others' children unfindable.

With `partial`, the beginning of a block is worth something too. `part` finds what follows the hits in the chain's next
block: the longest run of tokens that any block with the same parent begins with. For its sake the last block of a
request, which is not full, is kept as a *tail*: it has a parent and tokens like a named block, but no name, so only
`part` can find it. It queues like a cached block, and ends when its slot is handed out or when it is full and named.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict
from numpy.typing import NDArray

from events.blocks import TOKEN_BYTES
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Hash, KnownEvent
from replica.chain import Chain
from replica.messages import PoolSnapshot
from replica.names import NOBODY, Names, Slots

MEDIUM = "GPU"
FEW = 64  # blocks whose tokens are compared all at once
NOT_NAMED = -1  # instead of the parent's identity, also of a block that is no tail either


class Lookups(Struct):
    """What admitted requests asked of the cache and found; those that had been preempted are counted apart."""

    query_tokens: int = 0
    hit_tokens: int = 0
    query_blocks: int = 0
    hit_blocks: int = 0
    partial_hit_tokens: int = 0
    preempted_query_tokens: int = 0
    preempted_hit_tokens: int = 0


class Match(NamedTuple):
    """The longest cached prefix of a chain: the blocks that hold it, and the identity of the last (0: none)."""

    blocks: list[int]
    identity: int
    refused: bool = False  # the next block's key is here, with other content


class Part(NamedTuple):
    """The first `tokens` of a chain's next block, as the block `source` holds them."""

    source: int
    tokens: int
    adoptable: bool  # they are all that it holds, and nobody uses it: it may be taken as a hit and written on


class Preview(NamedTuple):
    """What an allocation would take: the blocks it would be handed, found as they are asked for; are there enough?"""

    candidates: Iterator[int]
    can_satisfy: bool


NO_MATCH = Match([], 0)
NO_PART = Part(NOBODY, 0, adoptable=False)


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens; without `caching` none of them is ever named, or found by a part."""

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, partial: bool = False, events: bool = True
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.partial = partial and caching
        self.events = events
        self.free = num_blocks  # without a reference
        self.unreferenced = 0  # of those, named
        self.named = 0  # all copies counted
        self.evictions = 0
        self.collisions_refused = 0
        self.lookups = Lookups()
        # One number per slot, in memory seen in two ways: `array` is faster for one slot, numpy (`_many`) for several.
        # The free queue is a ring through the slots without a reference, with slot `num_blocks` as its end.
        self._references = array("i", bytes(4 * num_blocks))
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._previous = array("i", [num_blocks, *range(num_blocks)])
        self._many_references = np.frombuffer(self._references, np.int32)
        self._many_next = np.frombuffer(self._next, np.int32)
        self._many_previous = np.frombuffer(self._previous, np.int32)
        # Of named slots: the oldest copy of every key is in `_names`, the others in `_copies` as they were made.
        self._names = Names(num_blocks)
        self._copies: dict[int, list[int]] = {}
        self._identity = array("q", bytes(8 * num_blocks))
        self._parent = array("q", [NOT_NAMED]) * num_blocks  # the identity before it
        self._filled = array("i", bytes(4 * num_blocks))  # tokens that can be found: all if named, fewer of a tail
        self._many_identities = np.frombuffer(self._identity, np.int64)
        self._many_parents = np.frombuffer(self._parent, np.int64)
        self._many_filled = np.frombuffer(self._filled, np.int32)
        self._tokens = np.zeros(num_blocks, np.dtype((np.void, TOKEN_BYTES * block_size)))
        self._rows = self._tokens.view(np.uint32).reshape(num_blocks, block_size)
        self._exact: dict[int, bytes] = {}  # extra keys of the few slots that have any
        self._last_identity = 0
        self._events: list[KnownEvent] = []

    # ---- look up

    def match(self, chain: Chain) -> Match:
        """The longest cached prefix, at least one token short of the chain: the last one must be computed to go on."""
        count = min(len(chain.keys), (len(chain) - 1) // self.block_size)
        if not count or self._names.find(chain.keys[0]) == NOBODY:
            return NO_MATCH
        slots = self._names.find_many(np.frombuffer(chain.keys, np.uint64, count))
        missing = np.flatnonzero(slots == NOBODY)
        slots = slots[: missing[0]] if missing.size else slots
        verified = self._same_content(chain, slots)
        blocks: list[int] = slots[:verified].tolist()
        return Match(blocks, self._identity[blocks[-1]] if blocks else 0, verified < len(slots))

    def _same_content(self, chain: Chain, slots: Slots) -> int:
        """How many of these slots, from the first, hold what the chain says."""
        count = len(slots)
        tokens = np.frombuffer(chain.tokens, self._tokens.dtype, count)
        stored = self._tokens.take(slots)
        parents, before = self._many_parents[slots], np.zeros(count, np.int64)
        before[1:] = self._many_identities[slots[:-1]]
        if parents.tobytes() != before.tobytes() or stored.tobytes() != tokens.tobytes():
            count = int(np.argmin((parents == before) & (stored == tokens)))
        if self._exact or chain.exact:
            for index, slot in enumerate(slots[:count].tolist()):
                if self._exact.get(slot) != chain.exact.get(index):
                    return index
        return count

    def part(self, chain: Chain, match: Match) -> Part:
        """How far the chain's next block is held by any block, but for the chain's last token."""
        index = len(match.blocks)
        start = index * self.block_size
        count = min(self.block_size, len(chain) - 1 - start)
        if not self.partial or count <= 0:
            return NO_PART
        own = np.frombuffer(chain.tokens, np.uint32, count, start * TOKEN_BYTES)
        source, tokens = self._longest_run(match.identity, own, chain.exact.get(index))
        if not tokens:
            return NO_PART
        return Part(source, tokens, tokens == self._filled[source] < self.block_size and not self._references[source])

    def _longest_run(self, parent: int, own: NDArray[np.uint32], exact: bytes | None) -> tuple[int, int]:
        """Which block after the parent begins with most of these tokens, and with how many."""
        # A scan of all slots: 10 us for 27,000. A table of children would cost that much at every naming and eviction.
        slots = np.flatnonzero(self._many_parents == parent)
        slots = slots[self._column(0, slots) == own[0]]
        if self._exact or exact is not None:
            slots = np.array([slot for slot in slots.tolist() if self._exact.get(slot) == exact], np.intp)
        if not slots.size:
            return NOBODY, 0
        shared = 1
        while slots.size > FEW and shared < len(own):  # thousands may begin a prompt alike; most part soon
            longer = (self._column(shared, slots) == own[shared]) & (self._many_filled.take(slots) > shared)
            if not longer.any():
                return int(slots[0]), shared
            slots = slots[longer]
            shared += 1
        differs = np.ones((len(slots), len(own) + 1), np.bool_)  # one more, where every run ends
        np.not_equal(self._rows.take(slots, axis=0)[:, : len(own)], own, out=differs[:, :-1])
        runs = np.minimum(differs.argmax(axis=1), self._many_filled[slots])
        best = int(runs.argmax())
        return int(slots[best]), int(runs[best])

    def _column(self, offset: int, slots: Slots) -> NDArray[np.uint32]:
        """The token at this place of each of the blocks."""
        return self._rows.reshape(-1).take(slots * self.block_size + offset)

    def count_lookup(self, tokens: int, match: Match, part: Part = NO_PART, *, again: bool) -> None:
        """A request of so many tokens was admitted with these hits; `again`: after a preemption."""
        lookups, hit_blocks = self.lookups, len(match.blocks)
        hit_tokens = hit_blocks * self.block_size
        self.collisions_refused += match.refused
        if again:
            lookups.preempted_query_tokens += tokens
            lookups.preempted_hit_tokens += hit_tokens
        else:
            lookups.query_tokens += tokens
            lookups.hit_tokens += hit_tokens
            lookups.query_blocks += tokens // self.block_size
            lookups.hit_blocks += hit_blocks
            lookups.partial_hit_tokens += part.tokens

    # ---- take and release

    def preview(self, hits: Sequence[int], new: int) -> Preview:
        """What `take` would do. A hit that waits in the free queue cannot also be handed out as a new block."""
        references = self._references
        rescued = {block for block in hits if not references[block]}
        can_satisfy = self.free - len(rescued) >= new
        remaining = (block for block in self.free_queue() if block not in rescued)
        return Preview(islice(remaining, new if can_satisfy else 0), can_satisfy)

    def take(self, hits: Sequence[int], new: int) -> list[int] | None:
        """The hits, each with one more reference, and `new` blocks; None, and nothing changed, if there is no room."""
        if not self.preview(hits, new).can_satisfy:
            return None
        self.touch(hits)
        return [*hits, *self._hand_out(new)]

    def touch(self, blocks: Sequence[int]) -> None:
        """One more user for each of these; those that wait in the free queue are rescued from it."""
        references, following, previous = self._references, self._next, self._previous
        for block in blocks:
            if not references[block]:
                before, after = previous[block], following[block]
                following[before] = after
                previous[after] = before
                self.free -= 1
                self.unreferenced -= self._filled[block] == self.block_size
            references[block] += 1

    def _hand_out(self, count: int) -> list[int]:
        """The first blocks of the free queue, unnamed; the caller has made sure that there are enough."""
        following = self._next
        blocks: list[int] = []
        block = self.num_blocks
        for _ in range(count):
            block = following[block]
            blocks.append(block)
        slots = np.array(blocks, np.intp)
        self._many_references[slots] = 1
        after = following[block]
        following[self.num_blocks] = after
        self._previous[after] = self.num_blocks
        self.free -= count
        findable = slots[self._many_parents[slots] != NOT_NAMED]
        if findable.size:
            self._evict(findable)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """One user less for each; the tail of the request goes first, because its head is the likelier to be shared."""
        slots = np.array(blocks, np.intp)[::-1]
        left = self._many_references[slots] - 1
        assert not left.size or left.min() >= 0, f"a block of {blocks} is released more often than taken"
        self._many_references[slots] = left
        unused = slots[left == 0]
        is_findable = self._many_parents[unused] != NOT_NAMED
        end = self.num_blocks
        self._link(self._previous[end], unused[is_findable], end)
        self._link(end, unused[~is_findable], self._next[end])
        self.free += len(unused)
        self.unreferenced += int(np.count_nonzero(self._many_filled[unused] == self.block_size))

    def _link(self, before: int, slots: Slots, after: int) -> None:
        """Put slots between two neighbours of the free queue."""
        if not len(slots):
            return
        ring = np.concatenate(([before], slots, [after]))
        self._many_next[ring[:-1]] = ring[1:]
        self._many_previous[ring[1:]] = ring[:-1]

    # ---- name and forget

    def store(self, chain: Chain, blocks: Sequence[int], stop: int) -> None:
        """Name the chain's blocks up to `stop`, now that they are filled; `blocks` are the chain's from its start."""
        start = chain.named
        if stop <= start or chain.identity is None or not self.caching:
            return
        copies: list[int] = []
        if stop - start == 1 or not self._name_all(chain, blocks, start, stop):
            stop, copies = self._name_each(chain, blocks, start, stop)
        self.named += stop - start
        chain.named = stop
        if self.events:
            self._announce(chain, start, stop, copies)

    def _name_all(self, chain: Chain, blocks: Sequence[int], start: int, stop: int) -> bool:
        """As `_name_each` does, at once; False, and nothing done, unless each of them is a first copy."""
        keys = np.frombuffer(chain.keys, np.uint64, stop - start, start * chain.keys.itemsize)
        slots = np.array(blocks[start:stop], np.intp)
        if not self._names.add_many(keys, slots):
            return False
        assert chain.identity is not None
        identities = np.arange(self._last_identity + 1, self._last_identity + 1 + stop - start)
        self._many_identities[slots] = identities
        self._many_parents[slots] = identities - 1
        self._parent[blocks[start]] = chain.identity
        self._last_identity = chain.identity = int(identities[-1])
        self._keep_content(chain, slots, start, stop)
        return True

    def _name_each(self, chain: Chain, blocks: Sequence[int], start: int, stop: int) -> tuple[int, list[int]]:
        """Where naming had to end, and which of the blocks are copies of others."""
        names = self._names
        copies: list[int] = []
        for index in range(start, stop):
            key, block = chain.keys[index], blocks[index]
            assert chain.identity is not None
            first = names.find(key)
            if first == NOBODY:
                names.add(key, block)
                self._last_identity += 1
                self._identity[block] = self._last_identity
            elif self._has_content(first, chain, index):
                names.keys[block] = key
                self._copies.setdefault(key, []).append(block)
                self._identity[block] = self._identity[first]
                copies.append(index)
            else:
                self.collisions_refused += 1
                chain.identity = None
                return index, copies
            self._parent[block] = chain.identity
            chain.identity = self._identity[block]
            self._keep_content(chain, block, index, index + 1)
        return stop, copies

    def _has_content(self, slot: int, chain: Chain, index: int) -> bool:
        """Whether the slot holds what the chain has in block `index`, not only a block of the same key."""
        tokens = chain.tokens[index * self.block_size : (index + 1) * self.block_size]
        return (
            self._parent[slot] == chain.identity
            and self._exact.get(slot) == chain.exact.get(index)
            and self._tokens[slot].tobytes() == tokens.tobytes()
        )

    def _keep_content(self, chain: Chain, slots: Slots | int, start: int, stop: int) -> None:
        """Remember what hits on the slots of these blocks will be verified by."""
        self._many_filled[slots] = self.block_size
        first_byte = start * self._tokens.itemsize
        self._tokens[slots] = np.frombuffer(chain.tokens, self._tokens.dtype, stop - start, first_byte)
        for index, exact in chain.exact.items():
            if start <= index < stop:
                slot = slots if isinstance(slots, int) else int(slots[index - start])
                self._exact[slot] = exact

    def _announce(self, chain: Chain, start: int, stop: int, copies: list[int]) -> None:
        """One event for each run of first copies."""
        for end in [*copies, stop]:
            if end > start:
                self._events.append(
                    BlockStored(
                        block_hashes=chain.keys[start:end].tolist(),  # type: ignore[arg-type]
                        parent_block_hash=chain.parent_key(start),
                        token_ids=chain.tokens[start * self.block_size : end * self.block_size],
                        block_size=self.block_size,
                        lora_id=None,
                        medium=MEDIUM,
                        lora_name=chain.lora_name,
                        extra_keys=chain.event_extras(start, end),
                    )
                )
            start = end + 1

    def keep_tail(self, chain: Chain, blocks: Sequence[int], computed: int) -> None:
        """Let `part` find the computed tokens of the block after the chain's named ones, which they do not fill."""
        start = chain.named * self.block_size
        if not self.partial or chain.identity is None or computed <= start:
            return
        assert computed - start < self.block_size, f"a block before token {computed} is full and has no name"
        slot, exact = blocks[chain.named], chain.exact.get(chain.named)
        tokens = np.frombuffer(chain.tokens, np.uint32, computed - start, start * TOKEN_BYTES)
        self._parent[slot], self._filled[slot] = NOT_NAMED, 0
        self._exact.pop(slot, None)
        if self._longest_run(chain.identity, tokens, exact)[1] == len(tokens):
            return  # another block holds all of it: this one is free as soon as its request ends
        self._parent[slot], self._filled[slot] = chain.identity, len(tokens)
        self._rows[slot, : len(tokens)] = tokens
        if exact is not None:
            self._exact[slot] = exact

    def _evict(self, slots: Slots) -> None:
        """Take the names of blocks that have just been handed out, and end the tails among them."""
        findable, slots = slots, slots[self._many_filled[slots] == self.block_size]
        self._many_parents[findable] = NOT_NAMED
        self._many_filled[findable] = 0
        if self._exact:
            for block in findable.tolist():
                self._exact.pop(block, None)
        if not slots.size:
            return
        self.unreferenced -= len(slots)
        self.named -= len(slots)
        self.evictions += len(slots)
        if self._copies:
            slots = np.array([block for block in slots.tolist() if not self._forget_copy(block)], np.intp)
        self._names.remove_many(slots)
        if self.events and slots.size:
            keys: list[Hash] = [self._names.keys[block] for block in slots.tolist()]
            self._events.append(BlockRemoved(keys, MEDIUM))

    def _forget_copy(self, block: int) -> bool:
        """Drop one copy of several; False if it is the only one."""
        key = self._names.keys[block]
        copies = self._copies.get(key)
        if copies is None:
            return False
        if block in copies:
            copies.remove(block)
        else:
            self._names.remove(block)
            self._names.add(key, copies.pop(0))
        if not copies:
            del self._copies[key]
        return True

    def reset(self) -> bool:
        """Forget everything; refused (False) while any block is in use."""
        if self.free < self.num_blocks:
            return False
        self._names.clear()
        self._copies.clear()
        self._exact.clear()
        self._many_parents[:] = NOT_NAMED
        self._many_filled[:] = 0
        self.unreferenced = self.named = 0
        if self.events:
            self._events.append(AllBlocksCleared())
        return True

    # ---- say

    def take_events(self) -> list[KnownEvent]:
        """What has been stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def resident(self) -> set[int]:
        """The keys of all cached blocks."""
        return {self._names.keys[slot] for slot in self._names.slots().tolist()}

    def snapshot(self) -> PoolSnapshot:
        return PoolSnapshot(
            **asdict(self.lookups),
            evictions=self.evictions,
            collisions_refused=self.collisions_refused,
            total=self.num_blocks,
            free=self.free,
            cached=self.named,
            unreferenced=self.unreferenced,
            referenced=self.num_blocks - self.free,
        )

    def free_queue(self) -> Iterator[int]:
        """The blocks without a reference, in the order they would be handed out."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def references(self, block: int) -> int:
        return self._references[block]

    def findable_tokens(self, block: int) -> int:
        """All of a named block, the kept part of a tail, none of any other."""
        return self._filled[block]

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        queue = list(self.free_queue())
        assert len(queue) == len(set(queue)) == self.free, f"{len(queue)} blocks queue, {self.free} are counted free"
        backwards = [self.num_blocks, *queue]
        assert [self._previous[block] for block in [*queue, self.num_blocks]] == backwards, "the queue's links disagree"
        unused = {block for block in range(self.num_blocks) if self._references[block] == 0}
        assert unused == set(queue), f"{unused ^ set(queue)} are free and not queued, or queued and not free"
        assert min(self._references) >= 0, "a reference count is negative"
        named = {block for block in range(self.num_blocks) if self._filled[block] == self.block_size}
        findable = {block for block in range(self.num_blocks) if self._parent[block] != NOT_NAMED}
        assert self.unreferenced == len(named & unused), f"{self.unreferenced} are counted as unreferenced"
        assert self.named == len(named), f"{self.named} are counted as named, {len(named)} are"
        first_copies = self._names.slots().tolist()
        others = [block for copies in self._copies.values() for block in copies]
        assert sorted([*first_copies, *others]) == sorted(named), "a named block is in no list of names, or in two"
        assert all(self._names.find(self._names.keys[block]) == block for block in first_copies), "a name is not found"
        identities = [self._identity[block] for block in first_copies]
        assert len(identities) == len(set(identities)), "two contents share an identity"
        assert all(0 < identity <= self._last_identity for identity in identities), "an identity was never given"
        assert findable == {block for block in range(self.num_blocks) if self._filled[block]}, "found without a parent"
        assert self.partial or findable == named, "there is a tail, and partial reuse is off"
        assert min(self._filled) >= 0 and max(self._filled) <= self.block_size, "more or less is filled than a block"
        assert max(self._parent) <= self._last_identity, "a parent's identity was never given"
        assert self._exact.keys() <= findable, "extra keys of a block that cannot be found"
        for key, copies in self._copies.items():
            assert copies, f"key {key:x} has an empty list of copies"
            self._check_copies(self._names.find(key), copies)

    def _check_copies(self, first: int, copies: list[int]) -> None:
        for copy in copies:
            assert self._names.keys[copy] == self._names.keys[first], f"blocks {copy} and {first} differ in their key"
            assert self._identity[copy] == self._identity[first], f"blocks {copy} and {first} differ in identity"
            assert self._parent[copy] == self._parent[first], f"blocks {copy} and {first} differ in their parent"
            assert self._tokens[copy] == self._tokens[first], f"blocks {copy} and {first} differ in tokens"
            assert self._exact.get(copy) == self._exact.get(first), f"blocks {copy} and {first} differ in extra keys"
