"""The content of each block, by which a hit is verified.

An identity is a number given to one content (tokens and extra keys from the start of the chain) and to no other ever.
A content has the same identity in all media: the slots of lower media (`replica.tiers`) follow those of the pool.

The last block of a request, which is not full, is kept as a *tail*: it has a parent and tokens like a named block, but
no name, so it is found only by its beginning. It queues like a cached block, and ends when its slot is handed out or
when it is full and named.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from events.blocks import TOKEN_BYTES
from replica.cache.chain import Chain, keys_in
from replica.cache.names import NOBODY, Slots

SEVERAL = -1  # instead of the next identity, if more than one has followed
NOT_NAMED = -1  # instead of the parent's identity, also of a block that is no tail either
MOST_TOKENS = 131_072  # a neighbour is told of prefixes with so many at most; twice as many fit into an answer
FEW = 64  # blocks whose tokens are compared all at once


class Origin(NamedTuple):
    """The part of a block's event that its tokens do not say."""

    lora_name: str | None
    extra_keys: list[object] | None


class Contents:
    """By slot, in memory seen in two ways: `array` is faster for one slot, numpy (`many`) for several."""

    def __init__(self, num_blocks: int, block_size: int, lower_slots: int = 0) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        num_slots = num_blocks + lower_slots
        self.last_identity = 0
        self.identity = array("q", bytes(8 * num_slots))
        self.parent = array("q", [NOT_NAMED]) * num_slots  # the identity before it
        self.filled = array("i", bytes(4 * num_slots))  # tokens that can be found: all if named, fewer of a tail
        self.many_identities = np.frombuffer(self.identity, np.int64)
        self.many_parents = np.frombuffer(self.parent, np.int64)
        self.many_filled = np.frombuffer(self.filled, np.int32)
        # Lower media alone need the identity that has followed each one, or SEVERAL.
        self.next_identities: NDArray[np.int64] = np.zeros(num_slots if lower_slots else 0, np.int64)
        self.tokens = np.zeros(num_slots, np.dtype((np.void, TOKEN_BYTES * block_size)))
        self.rows: NDArray[np.uint32] = self.tokens.view(np.uint32).reshape(num_slots, block_size)
        self.exact: dict[int, bytes] = {}  # extra keys of the few slots that have any
        # Events of lower media alone need the key before each block, and the origin of the few that have one.
        self.parent_keys: NDArray[np.uint64] = np.zeros(num_slots if lower_slots else 0, np.uint64)
        self.origins: dict[int, Origin] = {}

    def count_same(self, chain: Chain, slots: Slots, start: int = 0, parent: int = 0) -> int:
        """Count the slots, from the first, that hold the chain's own content from block `start` on.

        `parent` is the identity before that block.
        """
        count = len(slots)
        tokens = np.frombuffer(chain.tokens, self.tokens.dtype, count, start * self.tokens.itemsize)
        stored = self.tokens.take(slots)
        parents, before = self.many_parents[slots], np.full(count, parent, np.int64)
        before[1:] = self.many_identities[slots[:-1]]
        if parents.tobytes() != before.tobytes() or stored.tobytes() != tokens.tobytes():
            count = int(np.argmin((parents == before) & (stored == tokens)))
        if self.exact or chain.exact:
            for index, slot in enumerate(slots[:count].tolist()):
                if self.exact.get(slot) != chain.exact.get(start + index):
                    return index
        return count

    def is_same(self, slot: int, chain: Chain, index: int) -> bool:
        """Compare the slot with the chain's block `index`, which has the same key and follows the chain's identity."""
        return (
            self.parent[slot] == chain.identity
            and self.exact.get(slot) == chain.exact.get(index)
            and self.tokens[slot].tobytes() == chain.tokens_of(index)
        )

    def identify(self, chain: Chain, slots: Slots, known: NDArray[np.int64]) -> None:
        """Give the chain's next blocks the identities that are `known`, and the rest new ones."""
        assert chain.identity is not None
        first = self.last_identity + 1
        self.last_identity += len(slots) - len(known)
        identities = np.concatenate((known, np.arange(first, self.last_identity + 1)))
        self.many_identities[slots] = identities
        self.many_parents[slots[1:]] = identities[:-1]
        self.parent[slots[0]] = chain.identity
        chain.identity = int(identities[-1])

    def fill(self, chain: Chain, slots: Slots | int, start: int, stop: int) -> None:
        """Record the chain's tokens in its blocks from `start` to `stop`."""
        self.many_filled[slots] = self.block_size
        first_byte = start * self.tokens.itemsize
        self.tokens[slots] = np.frombuffer(chain.tokens, self.tokens.dtype, stop - start, first_byte)
        for index, exact in chain.exact.items():
            if start <= index < stop:
                slot = slots if isinstance(slots, int) else int(slots[index - start])
                self.exact[slot] = exact
        if self.parent_keys.size:
            all_slots = [slots] if isinstance(slots, int) else slots.tolist()
            self.parent_keys[all_slots[0]] = chain.keys[start - 1] if start else 0
            self.parent_keys[all_slots[1:]] = np.frombuffer(chain.keys, np.uint64)[start : stop - 1]
            for slot, own in zip(all_slots, chain.event_extras(start, stop) or (), strict=False):
                self.origins[slot] = Origin(chain.lora_name, own)

    def followed(self, slots: Slots, identities: NDArray[np.int64]) -> None:
        """Record that each of these identities, if it is one, follows the content of its slot."""
        slots, identities = slots[identities != 0], identities[identities != 0]
        known = self.next_identities[slots]
        self.next_identities[slots] = np.where((known == 0) | (known == identities), identities, SEVERAL)

    def copy(self, sources: Slots, targets: Slots) -> None:
        """Record that each target holds what its source holds."""
        for field in (self.many_identities, self.many_parents, self.many_filled, self.tokens, self.parent_keys):
            field[targets] = field[sources]
        self.next_identities[targets] = self.next_identities[sources]
        if self.exact or self.origins:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                if source in self.exact:
                    self.exact[target] = self.exact[source]
                if source in self.origins:
                    self.origins[target] = self.origins[source]

    def of_other_adapter(self, lora_name: str, lora_digest: str) -> Slots:
        """Find what an adapter of this name, but with another digest, has left in any medium."""
        firsts = {slot: keys_in(exact, 0) for slot, exact in self.exact.items() if self.parent[slot] == 0}
        found = [slot for slot, own in firsts.items() if own.lora_name == lora_name and own.lora_digest != lora_digest]
        identities = {self.identity[slot] for slot in found if self.filled[slot] == self.block_size}
        later = np.flatnonzero(self.many_parents > 0) if identities else np.zeros(0, np.intp)
        # A parent's identity is lower than its children's: it has been looked at when they are.
        for slot in later[np.argsort(self.many_parents[later], kind="stable")].tolist():
            if self.parent[slot] in identities:
                found.append(slot)
                if self.filled[slot] == self.block_size:
                    identities.add(self.identity[slot])
        return np.array(found, np.intp)

    # ---- beginnings of prompts

    def hottest(self, most_blocks: int, model: str) -> list[Chain]:
        """Return chains of `most_blocks` different blocks at most, those with which most prompts begin first.

        The more blocks and tails follow a block, the more prompts do. Of those that nothing follows, which are the ends
        of sessions, the newest comes first.
        """
        filled, parents = self.many_filled[: self.num_blocks], self.many_parents[: self.num_blocks]
        slots = np.flatnonzero(filled == self.block_size)
        identities, places = np.unique(self.many_identities[slots], return_index=True)
        slots = slots[places]  # without copies
        before = np.concatenate((parents[slots], parents[(filled > 0) & (filled < self.block_size)]))
        known = np.searchsorted(identities, before[np.isin(before, identities)])
        followers = np.bincount(known, minlength=len(identities))
        ends = np.lexsort((-identities, -followers))
        slot_of = dict(zip(identities.tolist(), slots.tolist(), strict=True))
        chains, told, left = list[Chain](), set[int](), MOST_TOKENS // self.block_size
        for end in identities[ends[followers[ends] != 1]].tolist():
            path, identity = list[int](), end
            while identity in slot_of and slot_of[end] not in told:
                path.append(slot_of[identity])
                identity = self.parent[path[-1]]
            left -= len(path)
            if left < 0:
                break
            if not identity and len(told) + sum(slot not in told for slot in path) <= most_blocks:
                told.update(path)
                path.reverse()
                own = [keys_in(self.exact.get(slot), index) for index, slot in enumerate(path)]
                extras = {index: keys.extras for index, keys in enumerate(own) if keys.extras}
                tokens = array("I", self.rows[path].tobytes())
                named = {name: getattr(own[0], name) for name in ("lora_name", "lora_digest", "cache_salt")}
                chains.append(Chain(tokens, self.block_size, model, **named, extras=extras))
        return chains

    # ---- beginnings of blocks

    def find_beginning(self, chain: Chain, index: int, identity: int) -> tuple[int, int]:
        """Find the block that begins as the chain's block `index` does, and how many tokens they share; 0: none does.

        `identity` is that of the block before. The chain's last token does not count: it must be computed to go on.
        """
        start = index * self.block_size
        count = min(self.block_size, len(chain) - 1 - start)
        if count <= 0:
            return NOBODY, 0
        tokens = np.frombuffer(chain.tokens, np.uint32, count, start * TOKEN_BYTES)
        return self.longest_run(identity, tokens, chain.exact.get(index))

    def keep_tail(self, chain: Chain, slot: int, computed: int) -> None:
        """Let the computed tokens of the block after the chain's named ones be found, which they do not fill."""
        assert chain.identity is not None
        count = computed - chain.named * self.block_size
        assert count < self.block_size, f"a block before token {computed} is full and has no name"
        tokens = np.frombuffer(chain.tokens, np.uint32, count, chain.named * self.block_size * TOKEN_BYTES)
        exact = chain.exact.get(chain.named)
        self.forget(np.array([slot], np.intp))
        if self.longest_run(chain.identity, tokens, exact)[1] == count:
            return  # another block holds all of it: this one is free as soon as its request ends
        self.parent[slot], self.filled[slot] = chain.identity, count
        self.rows[slot, :count] = tokens
        if exact is not None:
            self.exact[slot] = exact

    def longest_run(self, parent: int, own: NDArray[np.uint32], exact: bytes | None) -> tuple[int, int]:
        """Find the block after the parent that begins with most of these tokens, and with how many."""
        # A scan of all slots: 10 us for 27,000. A table of children would cost that much at every naming and eviction.
        slots = np.flatnonzero(self.many_parents[: self.num_blocks] == parent)
        every_token = self.rows.reshape(-1)
        slots = slots[every_token.take(slots * self.block_size) == own[0]]
        if self.exact or exact is not None:
            slots = np.array([slot for slot in slots.tolist() if self.exact.get(slot) == exact], np.intp)
        if not slots.size:
            return NOBODY, 0
        shared = 1
        while slots.size > FEW and shared < len(own):  # thousands may begin a prompt alike; most part soon
            longer = every_token.take(slots * self.block_size + shared) == own[shared]
            longer &= self.many_filled.take(slots) > shared
            if not longer.any():
                return int(slots[0]), shared
            slots = slots[longer]
            shared += 1
        differs = np.ones((len(slots), len(own) + 1), np.bool_)  # one more, where every run ends
        np.not_equal(self.rows.take(slots, axis=0)[:, : len(own)], own, out=differs[:, :-1])
        runs = np.minimum(differs.argmax(axis=1), self.many_filled[slots])
        best = int(runs.argmax())
        return int(slots[best]), int(runs[best])

    # ---- which there are

    def is_findable(self, slots: Slots) -> NDArray[np.bool_]:
        """Distinguish named blocks and tails from empty blocks."""
        findable: NDArray[np.bool_] = self.many_parents[slots] != NOT_NAMED
        return findable

    def is_full(self, slots: Slots) -> NDArray[np.bool_]:
        """Tell named blocks from all others."""
        full: NDArray[np.bool_] = self.many_filled[slots] == self.block_size
        return full

    def forget(self, slots: Slots) -> None:
        self.many_parents[slots] = NOT_NAMED
        if self.next_identities.size:
            self.next_identities[slots] = 0
        self.many_filled[slots] = 0
        if self.exact or self.origins:
            for slot in slots.tolist():
                self.exact.pop(slot, None)
                self.origins.pop(slot, None)

    def clear(self) -> None:
        self.exact.clear()
        self.origins.clear()
        self.many_parents[:] = NOT_NAMED
        self.next_identities[:] = 0
        self.many_filled[:] = 0

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        findable = {block for block, parent in enumerate(self.parent) if parent != NOT_NAMED}
        assert findable == {block for block, tokens in enumerate(self.filled) if tokens}, "found without a parent"
        assert min(self.filled) >= 0 and max(self.filled) <= self.block_size, "more or less is filled than a block"
        assert max(self.parent) <= self.last_identity, "a parent's identity was never given"
        assert self.exact.keys() <= findable, "extra keys of a block that cannot be found"
        assert self.origins.keys() <= findable, "the origin of a block that cannot be found"

    def check_copies(self, first: int, copies: Iterable[int]) -> None:
        for copy in copies:
            assert self.identity[copy] == self.identity[first], f"blocks {copy} and {first} differ in identity"
            assert self.parent[copy] == self.parent[first], f"blocks {copy} and {first} differ in their parent"
            assert self.tokens[copy] == self.tokens[first], f"blocks {copy} and {first} differ in tokens"
            assert self.exact.get(copy) == self.exact.get(first), f"blocks {copy} and {first} differ in extra keys"
