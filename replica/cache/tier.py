"""The blocks of one lower medium: named slots, in the order in which they are given up.

A slot that data moves to or from is held: it is out of the queue, so nobody takes it meanwhile. Each content has one
slot at most. Slots are counted from `first`, after those of the media above, as `replica.cache.contents` counts them.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from events.messages import BlockRemoved, BlockStored, KnownEvent
from replica.cache.contents import Contents, Origin
from replica.cache.free_queue import FreeQueue
from replica.cache.names import NOBODY, Keys, Names, Slots

NO_ORIGIN = Origin(None, None)


class Tier:
    def __init__(
        self, medium: str, first: int, num_slots: int, contents: Contents, events: list[KnownEvent] | None
    ) -> None:
        """`events` collects what is named and forgotten; None: nobody asks."""
        self.medium = medium
        self.first = first
        self.num_slots = num_slots
        self.named = 0
        self.evictions = 0
        self._contents = contents
        self._events = events
        self._names = Names(num_slots)
        self._queue = FreeQueue(num_slots)
        self._holders = array("i", bytes(4 * num_slots))
        self._many_holders = np.frombuffer(self._holders, np.int32)

    @property
    def free(self) -> int:
        """Slots that are not held, named or not."""
        return self._queue.length

    def __contains__(self, slot: int) -> bool:
        return self.first <= slot < self.first + self.num_slots

    # ---- look up

    def find(self, key: int) -> int:
        slot = self._names.find(key)
        return slot if slot == NOBODY else slot + self.first

    def find_many(self, keys: Keys) -> Slots:
        if not self.named:
            return np.full(len(keys), NOBODY, np.intp)
        slots = self._names.find_many(keys)
        slots[slots != NOBODY] += self.first
        return slots

    def keys(self, slots: Slots) -> Keys:
        return self._names.many_keys[slots - self.first]

    # ---- hold

    def is_held(self, slot: int) -> bool:
        return self._holders[slot - self.first] > 0

    def hold(self, slots: Sequence[int]) -> None:
        """Let nobody else have these slots, each given once, until they are released."""
        own = np.array(slots, np.intp) - self.first
        held = self._many_holders[own]
        self._many_holders[own] = held + 1
        self._queue.remove(own[held == 0].tolist())

    def release(self, slots: Sequence[int], *, next_to_go: bool = False) -> None:
        """End a hold; the slots queue last, or first if their contents are in a faster medium again.

        They go in the order in which they are given: the end of a prompt before its head, which is likelier shared.
        """
        own = np.array(slots, np.intp) - self.first
        left = self._many_holders[own] - 1
        assert not left.size or left.min() >= 0, f"{self.medium}: one of {slots} is released more often than held"
        self._many_holders[own] = left
        freed = own[left == 0]
        named = self._is_named(freed)
        (self._queue.prepend if next_to_go else self._queue.append)(freed[named])
        self._queue.prepend(freed[~named])

    def refresh(self, slots: Slots) -> None:
        """Let these named slots, in this order, be the last to go."""
        queued = [own for own in (slots - self.first).tolist() if not self._holders[own]]
        self._queue.remove(queued)
        self._queue.append(np.array(queued, np.intp))

    # ---- take, name and forget

    def take(self, count: int) -> Slots:
        """Hand out up to `count` slots, held once; what they had is forgotten."""
        own = np.array(self._queue.pop(min(count, self._queue.length)), np.intp)
        slots = own + self.first
        self._many_holders[own] = 1
        named = slots[self._is_named(own)]
        self.evictions += len(named)
        self._forget(named)
        return slots

    def name(self, slots: Slots, keys: Keys) -> None:
        """Name slots whose contents are recorded, heads first; no key is here yet, and none is given twice."""
        added = self._names.add_many(keys, slots - self.first)
        assert added, f"{self.medium}: a key is named twice"
        self.named += len(slots)
        if self._events is None or not slots.size:
            return
        contents = self._contents
        goes_on = contents.many_parents[slots[1:]] == contents.many_identities[slots[:-1]]
        # One event for each run of slots that follow each other in a chain.
        for run in np.split(slots, np.flatnonzero(~goes_on) + 1):
            first = int(run[0])
            origins = [contents.origins.get(slot, NO_ORIGIN) for slot in run.tolist()] if contents.origins else []
            stored = BlockStored(
                block_hashes=self.keys(run).tolist(),
                parent_block_hash=int(contents.parent_keys[first]) if contents.parent[first] else None,
                token_ids=array("I", contents.tokens[run].tobytes()),
                block_size=contents.block_size,
                lora_id=None,
                medium=self.medium,
                lora_name=origins[0].lora_name if origins else None,
            )
            if any(origin != NO_ORIGIN for origin in origins):
                stored.extra_keys = [origin.extra_keys for origin in origins]
            self._events.append(stored)

    def drop(self, slots: Slots) -> None:
        """Forget named slots, held or not: they are the next to be handed out."""
        queued = [slot for slot in (slots - self.first).tolist() if not self._holders[slot]]
        self._forget(slots)
        self._queue.remove(queued)
        self._queue.prepend(np.array(queued, np.intp))

    def clear(self) -> None:
        """Forget everything; its contents are cleared elsewhere. Held slots stay held."""
        self._names.clear()
        self.named = 0

    def _forget(self, slots: Slots) -> None:
        if not slots.size:
            return
        if self._events is not None:
            self._events.append(BlockRemoved(self.keys(slots).tolist(), self.medium))
        self._names.remove_many(slots - self.first)
        self._contents.forget(slots)
        self.named -= len(slots)

    def _is_named(self, own: Slots) -> "np.typing.NDArray[np.bool_]":
        return self._contents.is_full(own + self.first)

    # ---- say

    def slots(self) -> Slots:
        return self._names.slots() + self.first

    def resident(self) -> set[int]:
        return set(self.keys(self.slots()).tolist())

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        self._queue.check()
        assert min(self._holders) >= 0, f"{self.medium}: a negative number of holders"
        queued = set(self._queue)
        held = {slot for slot in range(self.num_slots) if self._holders[slot]}
        assert queued.isdisjoint(held), f"{self.medium}: slots {queued & held} are held and may be taken"
        assert queued | held == set(range(self.num_slots)), f"{self.medium}: a slot is lost"
        named = set(self._names.slots().tolist())
        filled = {slot for slot in range(self.num_slots) if self._contents.filled[slot + self.first]}
        assert named == filled, f"{self.medium}: slots {named ^ filled} are named without a content, or the other way"
        assert self.named == len(named), f"{self.medium}: {self.named} are counted as named, {len(named)} are"
        self._names.check()
        identities = [self._contents.identity[slot + self.first] for slot in named]
        assert len(identities) == len(set(identities)), f"{self.medium}: a content has two slots"
