"""The blocks that all replicas hold, in one structure: key -> mask of slots, for each medium and KV-cache group.

Almost all replicas have one group, which keeps whole prefixes: a hit is the leading blocks that they hold. Those with
other groups have a layout, and a hit is what all of its groups accept (`events.cache.groups`).

Keys are not kept by slot: what feeds the index knows them anyway, and passes them to `clear`. So each holder of a
shared block costs one bit.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import filterfalse, repeat
from operator import or_

from msgspec import Struct

from events.cache.changes import Change, Cleared, Grouped, Stored
from events.cache.groups import FULL, Layout, hits
from router.placement.holders import Gone, Holders, Matched, Optimistic, extended, leading
from router.placement.prices import CPU, GPU, OWN_SOURCES, source_of


class Matches(Struct, frozen=True, gc=False):
    """Leading blocks of a prompt, by slot. Equal parts may be the same object: do not change them."""

    gpu: Matched  # GPU memory, by events and optimistic entries
    sure: Matched  # GPU memory, by events alone
    below: tuple[tuple[str, Matched], ...] = ()  # each further source, the cheapest first, if it adds any
    readable: Matched = {}  # GPU or host memory of replicas that neighbours may read, by events alone

    @property
    def lower(self) -> Matched:
        return self.below[-1][1] if self.below else self.gpu

    def source(self, slot: int) -> str:
        """The slowest source that all blocks of the slot take."""
        most = self.lower.get(slot, 0)
        levels = ((GPU, self.gpu), *self.below)
        return next(source for source, level in levels if level.get(slot, 0) == most)


class PrefixIndex:
    """The index; a slot is its small number for a replica, and freed slots are used again."""

    def __init__(self) -> None:
        self.gone = Gone()
        self._gpu = Holders(self.gone)  # holders of the first group
        # A medium and group beside this is here only while a slot holds a block there.
        self.pools: dict[tuple[str, int], Holders] = {(GPU, 0): self._gpu}
        self._lower: list[tuple[str, Holders]] = []  # other media of the first group by source, the cheapest first
        self._layouts: dict[Layout, int] = {}  # masks of the slots that have one
        self._grouped = 0  # all of these
        self._blocks: dict[int, dict[tuple[str, int], int]] = {}  # slot -> medium and group -> blocks
        self._free: list[int] = []
        self.optimistic = Optimistic(self._gpu.masks)

    # ---- replicas

    def add(self) -> int:
        slot = heappop(self._free) if self._free else len(self._blocks)
        self._blocks[slot] = {}
        return slot

    def drop(self, slot: int) -> None:
        """Forget a replica. If a feed follows it, call `Feeds.leave` first, or this scans the whole index."""
        self.clear(slot)
        self.arrange(slot, None)
        self.optimistic.drop(slot)
        del self._blocks[slot]
        heappush(self._free, slot)

    # ---- their blocks

    def apply(self, slot: int, change: Change) -> None:
        if isinstance(change, Stored):
            if change.keys:
                self._add(slot, change.keys, change.medium, change.group)
            if change.medium == GPU:
                self.optimistic.confirm(slot, change.chain)
        elif isinstance(change, Cleared):
            self.clear(slot, change.held)
        elif isinstance(change, Grouped):
            self.arrange(slot, change.layout)
        else:
            self.remove(slot, change.keys, change.medium, change.group)

    def store(self, slot: int, keys: Collection[int], medium: str = GPU) -> None:
        self._add(slot, keys, medium)
        if medium == GPU and self.optimistic.holders.masks:
            self.optimistic.confirm(slot, keys)

    def clear(self, slot: int, held: Iterable[tuple[str, int, Iterable[int]]] = ()) -> None:
        """Forget every key of the replica: those that the caller gives by medium and group.

        Search the whole index for any others that are still counted.
        """
        for medium, group, keys in held:
            self.remove(slot, keys, medium, group)
        if any(self._blocks[slot].values()):
            for (medium, group), holders in list(self.pools.items()):
                self.remove(slot, holders.of(slot), medium, group)
        self._blocks[slot].clear()

    def lookahead(self, slot: int) -> int:
        """Tokens after a block that the replica's keys cover, too."""
        layout = self._layout(slot) if self._grouped >> slot & 1 else None
        return 0 if layout is None else layout.lookahead

    def longest_hit(self, slot: int, blocks: int) -> int:
        """Return how many of these blocks can be a hit: some groups accept only whole steps of several."""
        layout = self._layout(slot)
        return blocks if layout is None else blocks // layout.step * layout.step

    def _layout(self, slot: int) -> Layout | None:
        bit = 1 << slot
        return next((one for one, mask in self._layouts.items() if mask & bit), None) if self._grouped & bit else None

    def arrange(self, slot: int, layout: Layout | None) -> None:
        """Set the groups of a replica; None: one that keeps whole prefixes."""
        bit = 1 << slot
        if self._grouped & bit:
            for other, mask in list(self._layouts.items()):
                if mask & bit:
                    self._layouts[other] = mask ^ bit
                    if mask == bit:
                        del self._layouts[other]
            self._grouped ^= bit
        if layout is not None:
            self._layouts[layout] = self._layouts.get(layout, 0) | bit
            self._grouped |= bit

    def intern(self, keys: list[int]) -> list[int]:
        """The same keys, as the objects that other replicas use already: this halves the memory of a shared block."""
        return self._gpu.intern(keys)

    def _add(self, slot: int, keys: Collection[int], medium: str, group: int = 0) -> None:
        blocks, pool = self._blocks[slot], (medium, group)
        holders = self.pools.get(pool)
        if holders is None:
            holders = self.pools[pool] = Holders(self.gone)
            self._sort_lower()
        blocks[pool] = blocks.get(pool, 0) + holders.add(slot, keys)

    def remove(self, slot: int, keys: Iterable[int], medium: str = GPU, group: int = 0) -> None:
        blocks, pool = self._blocks[slot], (medium, group)
        holders = self.pools.get(pool)
        if holders is None:
            return
        blocks[pool] = blocks.get(pool, 0) - holders.discard(slot, keys)
        if not holders and holders is not self._gpu:
            del self.pools[pool]
            self._sort_lower()

    def _sort_lower(self) -> None:
        plain = (one for one in self.pools.items() if not one[0][1] and one[1] is not self._gpu)
        lower = [(source_of(medium), holders) for (medium, _), holders in plain]
        self._lower = sorted(lower, key=lambda one: OWN_SOURCES.index(one[0]))

    # ---- questions

    def match(
        self,
        keys: Sequence[int],
        slots: int,
        usable: int | None = None,
        ahead: Callable[[int], list[int]] | None = None,
        readers: int = 0,
    ) -> Matches:
        """Count the leading blocks of a prompt that each of these replicas holds (`slots`: a mask).

        `usable`: tokens that can be a hit at all. It matters to groups that keep only the end of a prefix.
        `ahead`: gives the prompt's keys that also cover so many tokens after their block.
        `readers`: a mask of replicas of which `readable` is wanted.
        """
        if self._grouped & slots:
            return self._match_grouped(keys, slots, usable, ahead, readers)
        held = confirmed = list(map(self._gpu.masks.get, keys, repeat(0)))
        sure = hoped = leading(held, slots)
        more = self.optimistic.holders.masks
        if more:
            routed = _masks(more, keys)
            hoped = extended(sure, held, routed, slots)
            held = list(map(or_, held, routed)) if self._lower else held
        if not self._lower:
            return Matches(hoped, sure, (), sure if readers else {})
        below, reached, readable = [], hoped, sure
        for source, holders in self._lower:
            masks = _masks(holders.masks, keys)
            if source == CPU and readers:
                readable = extended(readable, confirmed, masks, slots & readers)
                confirmed = list(map(or_, confirmed, masks))
            longer = extended(reached, held, masks, slots)
            held = list(map(or_, held, masks))
            if longer is not reached:
                below.append((source, longer))
                reached = longer
        return Matches(hoped, sure, tuple(dict(below).items()), readable if readers else {})

    def _match_grouped(
        self,
        keys: Sequence[int],
        slots: int,
        usable: int | None,
        ahead: Callable[[int], list[int]] | None,
        readers: int,
    ) -> Matches:
        """Match those with a layout one layout at a time, and the others as ever.

        Blocks routed to groups that keep part of a prefix do not count: which they will keep is not known yet. Nor are
        blocks of a group to be read by neighbours.
        """
        plain = slots & ~self._grouped
        found = self.match(keys, plain, readers=readers & plain) if plain else Matches({}, {})
        gpu, sure = dict(found.gpu), dict(found.sure)
        plain_levels = dict(found.below)
        lower = {medium for medium, _ in self.pools} - {GPU}
        media: dict[str, list[str]] = {}  # media by source, with those of all cheaper ones, in any group
        so_far = [GPU]
        for source in OWN_SOURCES:
            if own_media := [medium for medium in lower if source_of(medium) == source]:
                media[source] = so_far = [*so_far, *own_media]
        levels = {source: dict(plain_levels.get(source, {})) for source in media}
        for layout, mask in self._layouts.items():
            own = mask & slots
            if own:
                named = ahead(layout.lookahead) if layout.lookahead and ahead is not None else keys
                if usable is not None:
                    named = named[: (usable - layout.pairs) // layout.unit]
                held = hits(layout, named, partial(self._masks_of, (GPU,)), own)
                sure |= held
                if layout.whole and (routed := self.optimistic.holders.masks):
                    held = hits(layout, named, partial(self._masks_of, (GPU,), more=routed), own)
                gpu |= held
                for source, cheaper in media.items():
                    levels[source] |= hits(layout, named, partial(self._masks_of, cheaper), own)
        below, reached = [], gpu
        for source, level in levels.items():  # only what adds to those before, and never less than these
            longer = {slot: blocks for slot, blocks in level.items() if blocks > reached.get(slot, 0)}
            if longer:
                reached = reached | longer
                below.append((source, reached))
        return Matches(gpu, sure, tuple(below), found.readable)

    def _masks_of(
        self, media: Iterable[str], group: int, keys: Sequence[int], more: dict[int, int] | None = None
    ) -> list[int]:
        """The masks of these keys in a group, in any of the media, and of those held by `more`."""
        found = [0] * len(keys) if more is None else _masks(more, keys)
        for medium in media:
            if (holders := self.pools.get((medium, group))) is not None:
                found = list(map(or_, found, _masks(holders.masks, keys)))
        return found

    def holders(self, keys: Sequence[int]) -> list[int]:
        """For each block, the mask of its holders in any medium and group, by events alone."""
        held = [0] * len(keys)
        for holders in self.pools.values():
            held = list(map(or_, held, _masks(holders.masks, keys)))
        return held

    def blocks(self, slot: int) -> dict[str, int]:
        """Number of blocks by medium, those of every group."""
        found: dict[str, int] = {}
        for (medium, _), blocks in self._blocks[slot].items():
            if blocks:
                found[medium] = found.get(medium, 0) + blocks
        return found

    def prompt_blocks(self, slot: int) -> dict[str, int]:
        """Number of blocks by medium that prompts can use: one that several groups hold counts once.

        A hit needs its blocks in every group that keeps whole prefixes, so the group with the fewest counts.
        """
        layout, held = self._layout(slot), self.blocks(slot)
        if layout is None:
            return held
        pools = self._blocks[slot]
        whole = [group for group in layout.groups if group.rule == FULL] or layout.groups
        fewest = {one: min(pools.get((one, group.group), 0) * group.units for group in whole) for one in held}
        return {medium: blocks for medium, blocks in fewest.items() if blocks}

    def bytes_used(self) -> int:
        """An estimate, without the resolvers' memory."""
        return sum(holders.bytes_used() for holders in self.pools.values())

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken; optimistic entries have a check of their own."""
        assert sorted([*self._blocks, *self._free]) == list(range(len(self._blocks) + len(self._free))), (
            f"slots {sorted(self._blocks)} are in use and {sorted(self._free)} free"
        )
        for pool, holders in self.pools.items():
            assert holders or holders is self._gpu, f"nobody holds anything in {pool}"
            assert 0 not in holders.masks.values(), f"{pool}: a key that nobody holds"
            found = Counter(holders.counts())
            counted = {slot: blocks[pool] for slot, blocks in self._blocks.items() if blocks.get(pool)}
            assert found == counted, f"{pool}: {found} blocks by slot, {counted} counted"
        assert self._grouped == sum(self._layouts.values()), "a slot with two layouts"
        assert all(self._layouts.values()), "a layout that no slot has"


def _masks(masks: dict[int, int], keys: Iterable[int]) -> list[int]:
    return list(map(masks.get, keys, repeat(0)))


# ---- guesses

APPROXIMATE = 0  # the block size of a replica without events: its blocks are parts of a prompt's bytes
APPROXIMATE_TOKENS = 2**20  # most that a replica without events is assumed to hold
USUAL_APPROXIMATE_BLOCK_TOKENS = 64
USUAL_BLOCKS = APPROXIMATE_TOKENS // USUAL_APPROXIMATE_BLOCK_TOKENS


class Approximate:
    """Guessed cache contents of replicas without events, from the prompts routed to them.

    A guess is in the index under the replica's slot, as if the replica had stored it. It is bounded by the usual
    size of such a cache, and evicted as such caches evict: the least recently used first, a prompt's end before its
    beginning.
    """

    def __init__(self, index: PrefixIndex, capacity_blocks: int = USUAL_BLOCKS) -> None:
        """Bound the guess for each replica by the capacity."""
        self._index = index
        self._capacity_blocks = capacity_blocks
        self._held: dict[int, OrderedDict[int, None]] = {}  # queues by slot; the next to be forgotten is first
        # Prompts that peers have routed, by their first block: few are asked for again, and only those count.
        self.unread: OrderedDict[int, list[tuple[int, bytes]]] = OrderedDict()
        self._unread_bytes = 0

    def routed(self, slot: int, keys: Sequence[int]) -> None:
        """Count these blocks, a prompt's from its beginning, as cached by the replica now."""
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = OrderedDict()
        if len(keys) > self._capacity_blocks:
            keys = keys[: self._capacity_blocks]
        new = list(filterfalse(held.__contains__, keys))
        # The end of the prompt is to be forgotten before its beginning.
        held.update(dict.fromkeys(reversed(new)))
        if len(new) < len(keys):
            deque(map(held.move_to_end, reversed(keys)), maxlen=0)
        if new:
            self._index.store(slot, new)
            if (over := len(held) - self._capacity_blocks) > 0:
                self._index.remove(slot, [held.popitem(last=False)[0] for _ in range(over)])

    def heard(self, slot: int, keys: bytes) -> None:
        """Note that a peer has routed a prompt there; `keys`: 8 bytes each, little-endian."""
        if keys:
            self.unread.setdefault(int.from_bytes(keys[:8], "little"), []).append((slot, keys))
            self._unread_bytes += len(keys)
        while self._unread_bytes > 8 * self._capacity_blocks * max(1, len(self._held)):
            self._unread_bytes -= sum(len(keys) for _, keys in self.unread.popitem(last=False)[1])

    def read(self, first: int) -> None:
        """Count the prompts that begin with this block as cached now."""
        for slot, keys in self.unread.pop(first):
            self._unread_bytes -= len(keys)
            self.routed(slot, array("Q", keys).tolist())

    def blocks(self, slot: int) -> int:
        return len(self._held.get(slot, ()))

    def clear(self, slot: int) -> None:
        """Forget the blocks of a replica that is gone or empty."""
        for first in [first for first, prompts in self.unread.items() if any(slot == there for there, _ in prompts)]:
            self.read(first)
        self._index.clear(slot, ((GPU, 0, self._held.pop(slot, ())),))

    def check(self) -> None:
        assert self._unread_bytes == sum(len(keys) for prompts in self.unread.values() for _, keys in prompts)
        for slot, held in self._held.items():
            assert len(held) <= self._capacity_blocks
            known = sum(self._index.blocks(slot).values())
            assert known == len(held), f"slot {slot}: {known} blocks in the index, {len(held)} here"
