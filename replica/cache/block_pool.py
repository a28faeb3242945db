"""The blocks of KV memory: free blocks, cached prefixes and reference counts.

A block is in one of three states, and two events move it:

    free              unnamed, no reference     at the front of the free queue
    live              referenced                not in the queue; named as soon as it is full
    cached and free   named, no reference       in the queue, least recently used first

    take      free -> live, cached and free -> live: as a hit it keeps its name, as a new block it loses it (eviction)
    release   live -> cached and free if it is named, live -> free if not

Eviction is lazy: a released block can be found until its slot is handed out. The pool decides and says what happened as
events; it sends nothing, and knows neither requests nor time.

A name is the block's key (`events.blocks`), and it never decides alone: a hit must have the prompt's own tokens and
extra keys, and a parent with the identity of the block before it (`replica.cache.contents`). All copies of one content
share the identity, so a copy may be evicted or recycled without making the others' children unfindable.

Below the pool there may be slower media (`replica.tiers`), to which its blocks go and from which they come back. What
`match` finds there follows the hits.

With `partial`, the beginning of a block is worth something too: `part` finds what follows the hits in the chain's next
block, in a named block or in the last block of a request, which is not full (a tail in `replica.cache.contents`).
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain as chain_of

import numpy as np
from msgspec.structs import replace

from events.messages import AllBlocksCleared, BlockRemoved, Hash, KnownEvent
from replica.cache.chain import Chain
from replica.cache.contents import Contents
from replica.cache.free_queue import FreeQueue
from replica.cache.lower import LowerTiers
from replica.cache.names import NO_MATCH, NO_PART, NOBODY, Match, Names, PartialBlock, Slots
from replica.cache.retention import Retention
from replica.messages import PoolSnapshot

MEDIUM = "GPU"
NONE_KNOWN = np.zeros(0, np.int64)  # identities


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens; without `caching` none of them is ever named, or found by a part."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        partial: bool = False,
        events: bool = True,
        host_slots: int = 0,
        disk_slots: int = 0,
        retained_blocks: int = 0,
        retained_per_tenant: int = 0,
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
        self.unreferenced = 0  # named, without a reference
        self.named = 0  # all copies counted
        self.evictions = 0
        self.collisions_refused = 0
        self.lookups = PoolSnapshot()  # the counts of look-ups; `snapshot` has the rest
        # Memory is seen in two ways: `array` is faster for one slot, numpy (`_many`) for several.
        self._references = array("i", bytes(4 * num_blocks))
        self._many_references = np.frombuffer(self._references, np.int32)
        self._queue = FreeQueue(num_blocks)  # idle blocks that are retained are not in it
        self.retention = Retention(num_blocks, retained_blocks, retained_per_tenant)
        self._contents = Contents(num_blocks, block_size, host_slots + disk_slots)
        self._names = Names(num_blocks)
        self._events: list[KnownEvent] = []
        self.lower = None
        if caching and host_slots:
            self.lower = LowerTiers(self._contents, host_slots, disk_slots, self._events if events else None)

    @property
    def free(self) -> int:
        """Blocks without a reference."""
        return self._queue.length + self.retention.idle

    # ---- look up

    def match(self, chain: Chain) -> Match:
        """The longest cached prefix, at least one token short of the chain, whose last token must be computed."""
        count = min(len(chain.keys), (len(chain) - 1) // self.block_size)
        if not count:
            return NO_MATCH
        if self._names.find(chain.keys[0]) == NOBODY and (self.lower is None or not self.lower.has(chain.keys[0])):
            return NO_MATCH
        keys = np.frombuffer(chain.keys, np.uint64, count)
        slots = self._names.find_many(keys)
        if self.lower is not None:
            self.lower.fill_in(slots, keys)
        missing = np.flatnonzero(slots == NOBODY)
        slots = slots[: missing[0]] if missing.size else slots
        verified = self._contents.count_same(chain, slots)
        blocks: list[int] = slots[:verified].tolist()
        is_refused = verified < len(slots)
        if self.lower is None:
            return Match(blocks, self._contents.identity[blocks[-1]] if blocks else 0, is_refused)
        is_lower = slots[:verified] >= self.num_blocks
        hits = int(is_lower.argmax()) if is_lower.any() else verified
        after = blocks[hits : hits + int(np.logical_and.accumulate(is_lower[hits:]).sum())]
        return Match(blocks[:hits], self._contents.identity[blocks[hits - 1]] if hits else 0, is_refused, after)

    def part(self, chain: Chain, match: Match) -> PartialBlock:
        """Find the block that begins most as the chain's next block does."""
        if not self.partial:
            return NO_PART
        source, tokens = self._contents.find_beginning(chain, len(match.blocks), match.identity)
        if not tokens:
            return NO_PART
        is_all = tokens == self._contents.filled[source] < self.block_size
        return PartialBlock(source, tokens, is_all and not self._references[source])

    def count_lookup(self, tokens: int, match: Match, part: PartialBlock = NO_PART, *, again: bool) -> None:
        """Count an admitted request of this many tokens with its hits; `again`: after a preemption."""
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

    def take(self, hits: Sequence[int], new: int) -> list[int] | None:
        """The hits, each with one more reference, and `new` blocks; None, and nothing changed, if there is no room."""
        # A hit that waits in the free queue cannot also be handed out as a new block.
        if self.free - len({block for block in hits if not self._references[block]}) < new:
            return None
        if hits:
            self.touch(hits)
        if new > self._queue.length:
            # Let this many retained blocks be handed out.
            self._queue.append(self.retention.end(self.retention.first_to_go(new - self._queue.length)))
        blocks = self._queue.pop(new)
        slots = np.array(blocks, np.intp)
        self._many_references[slots] = 1
        findable = slots[self._contents.is_findable(slots)]
        if findable.size:
            self._evict(findable)
        return [*hits, *blocks]

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block, and take it out of the free queue."""
        references, filled = self._references, self._contents.filled
        rescued: list[int] = []
        for block in blocks:
            if not references[block]:
                rescued.append(block)
                self.unreferenced -= filled[block] == self.block_size
            references[block] += 1
        if rescued and self.retention.idle:
            rescued = self.retention.use(np.array(rescued, np.intp)).tolist()
        self._queue.remove(rescued)

    def release(self, blocks: Sequence[int], keep: int | None = None) -> None:
        """One user less for each; the tail of the request goes first, because its head is the likelier to be shared.

        `keep`: only what the first blocks have, as the others will not be asked for again; None: all.
        """
        slots = np.array(blocks, np.intp)[::-1]
        left = self._many_references[slots] - 1
        assert not left.size or left.min() >= 0, f"a block of {blocks} is released more often than taken"
        self._many_references[slots] = left
        unused = slots[left == 0]
        self.unreferenced += int(np.count_nonzero(self._contents.is_full(unused)))
        if self.retention.marked:
            is_marked = self.retention.is_marked(unused)
            self.retention.wait(unused[is_marked])
            unused = unused[~is_marked]
        if keep is not None:
            others = unused[np.isin(unused, blocks[keep:])]
            self._evict(others[self._contents.is_findable(others)], keep=False)
        is_findable = self._contents.is_findable(unused)
        self._queue.append(unused[is_findable])
        self._queue.prepend(unused[~is_findable])

    # ---- retain

    def retain(self, blocks: Sequence[int], tenant: str | None, ttl_s: float) -> None:
        """Give these named blocks up last, until nobody has used them for so long; they are in use now."""
        self._queue.append(self.retention.mark(np.array(blocks, np.intp), tenant, ttl_s))

    def expire(self, now_s: float) -> None:
        """Tell the time, and end every retention whose time is over."""
        self._queue.append(self.retention.expire(now_s))

    # ---- name and forget

    def store(self, chain: Chain, blocks: Sequence[int], stop: int, *, lasting: bool = True) -> None:
        """Name the chain's blocks up to `stop`, now that they are filled; `blocks` are the chain's from its start.

        It ends before a block whose key another content has. `lasting`: a disk is to have them, too.
        """
        start = chain.named
        if stop <= start or chain.identity is None or not self.caching:
            return
        names, contents = self._names, self._contents
        copies: list[int] = []
        end = stop if stop - start > 1 and self._name_all(chain, blocks, start, stop) else start
        while end < stop:
            key, block = chain.keys[end], blocks[end]
            first = names.find(key)
            if first == NOBODY:
                names.add(key, block)
                known = self.lower.identity(chain, end) if self.lower is not None else 0
                if not known:
                    contents.last_identity += 1
                contents.identity[block] = known or contents.last_identity
            elif contents.is_same(first, chain, end):
                names.add_copy(key, block)
                contents.identity[block] = contents.identity[first]
                copies.append(end)
            else:
                chain.identity = None
                self.collisions_refused += 1
                break
            contents.parent[block] = chain.identity
            chain.identity = contents.identity[block]
            contents.fill(chain, block, end, end + 1)
            end += 1
        self.named += end - start
        chain.named = end
        if self.events:  # each run of first copies is one
            begins = [start, *(copy + 1 for copy in copies)]
            runs = zip(begins, [*copies, end], strict=True)
            self._events += [chain.stored_event(begin, until, MEDIUM) for begin, until in runs if begin < until]
        if self.lower is not None:
            line = np.array(blocks[max(0, start - 1) : end], np.intp)
            contents.followed(line[:-1], contents.many_identities[line[1:]])
            if self.lower.disk is not None and lasting:  # a crash would take what only the pool has
                slots = np.array(blocks[start:end], np.intp)[~np.isin(range(start, end), copies)]
                self.lower.save_early(slots, names.many_keys[slots])

    def _name_all(self, chain: Chain, blocks: Sequence[int], start: int, stop: int) -> bool:
        """Name all at once; False, and nothing done, unless each is the pool's first copy of its content.

        What lower media have comes first: what follows a new content is new.
        """
        known = NONE_KNOWN if self.lower is None else self.lower.identities(chain, start, stop)
        if known is None:
            return False
        keys = np.frombuffer(chain.keys, np.uint64, stop - start, start * chain.keys.itemsize)
        slots = np.array(blocks[start:stop], np.intp)
        if not self._names.add_many(keys, slots):
            return False
        self._contents.identify(chain, slots, known)
        self._contents.fill(chain, slots, start, stop)
        return True

    def keep_tail(self, chain: Chain, blocks: Sequence[int], computed: int) -> None:
        """Let `part` find the computed tokens of the block after the chain's named ones, which they do not fill."""
        if self.partial and chain.identity is not None and computed > chain.named * self.block_size:
            self._contents.keep_tail(chain, blocks[chain.named], computed)

    def _evict(self, slots: Slots, *, keep: bool = True) -> None:
        """Take the names of blocks out of the queue, and end the tails among them; `keep`: in the medium below."""
        findable, slots = slots, slots[self._contents.is_full(slots)]
        if not slots.size:
            self._contents.forget(findable)
            return
        self.unreferenced -= len(slots)
        self.named -= len(slots)
        self.evictions += len(slots)
        if self._names.copies:
            slots = np.array([block for block in slots.tolist() if not self._names.drop_copy(block)], np.intp)
        if keep and self.lower is not None and slots.size:
            heads_first = slots[::-1]
            self.lower.save(heads_first, self._names.many_keys[heads_first])
        self._contents.forget(findable)
        self._names.remove_many(slots)
        if self.events and slots.size:
            keys: list[Hash] = [self._names.keys[block] for block in slots.tolist()]
            self._events.append(BlockRemoved(keys, MEDIUM))

    def forget_other_adapter(self, lora_name: str, lora_digest: str) -> None:
        """Forget what another adapter of this name has left below; nothing has been computed yet."""
        if self.lower is not None:
            self.lower.drop(self._contents.of_other_adapter(lora_name, lora_digest).tolist())

    def hottest(self, most_blocks: int, model: str) -> list[Chain]:
        return self._contents.hottest(most_blocks, model)

    def reset(self) -> bool:
        """Forget everything; refused (False) while any block is in use."""
        if self.free < self.num_blocks:
            return False
        if self.lower is not None:
            self.lower.clear()
        self._names.clear()
        self._contents.clear()
        self._queue.append(self.retention.order())
        self.retention.clear()
        self.unreferenced = self.named = 0
        if self.events:
            self._events.append(AllBlocksCleared())
        return True

    # ---- say

    def take_events(self) -> list[KnownEvent]:
        """Return the events since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def resident(self) -> set[int]:
        return set(self._names.many_keys[self._names.slots()].tolist())

    def snapshot(self) -> PoolSnapshot:
        return replace(
            self.lookups,
            evictions=self.evictions,
            collisions_refused=self.collisions_refused,
            total=self.num_blocks,
            free=self.free,
            cached=self.named,
            unreferenced=self.unreferenced,
            referenced=self.num_blocks - self.free,
            retained=self.retention.marked,
            retention_refused=self.retention.refused,
        )

    def free_queue(self) -> Iterator[int]:
        """The blocks without a reference, in the order they would be handed out."""
        return chain_of(self._queue, self.retention.order().tolist())

    def references(self, block: int) -> int:
        return self._references[block]

    def findable_tokens(self, block: int) -> int:
        """All of a named block, the kept part of a tail, none of any other."""
        return self._contents.filled[block]

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        for part in (self._queue, self._names, self._contents, self.retention, *([self.lower] if self.lower else ())):
            part.check()
        contents, queue = self._contents, set(self.free_queue())
        assert len(queue) == self.free, "a retained block is in the free queue, too"
        unused = {block for block in range(self.num_blocks) if self._references[block] == 0}
        assert unused == queue, f"{unused ^ queue} are free and not queued, or queued and not free"
        assert min(self._references) >= 0, "a reference count is negative"
        named = {block for block in range(self.num_blocks) if contents.filled[block] == self.block_size}
        assert self.unreferenced == len(named & unused), f"{self.unreferenced} are counted as unreferenced"
        retained = set(self.retention.blocks().tolist())
        assert retained <= named, f"{retained - named} are retained without a name"
        assert self.named == len(named), f"{self.named} are counted as named, {len(named)} are"
        empty = contents.filled[: self.num_blocks].count(0)
        assert self.partial or len(named) == self.num_blocks - empty, "a tail, without partial reuse"
        first_copies, copies = self._names.slots().tolist(), self._names.copies
        assert {*first_copies, *chain_of.from_iterable(copies.values())} == named, (
            "a named block is in no list of names"
        )
        identities = [contents.identity[block] for block in first_copies]
        assert len(identities) == len(set(identities)), "two contents share an identity"
        assert all(0 < identity <= contents.last_identity for identity in identities), "an identity was never given"
        for key, others in copies.items():
            contents.check_copies(self._names.find(key), others)
