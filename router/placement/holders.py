"""Which slots hold a key: a bit mask for each key, bit `1 << slot`."""

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from sys import getsizeof

# Above it the table that makes equal masks one object starts anew: some masks are then there twice, nothing is wrong.
SHARED_MASKS = 65_536
INT_BYTES = 48  # of a 64-bit key


class Holders:
    """The mask of every key that somebody holds; a key that nobody holds is absent."""

    __slots__ = ("_objects", "_shared", "masks")

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._objects: dict[int, int] = {}  # of keys that were stored when somebody held them already

    def __len__(self) -> int:
        return len(self.masks)

    def add(self, slot: int, keys: Collection[int]) -> int:
        """How many of the keys the slot had not held before."""
        masks, bit = self.masks, 1 << slot
        if masks.keys().isdisjoint(keys):
            before = len(masks)
            masks.update(dict.fromkeys(keys, self._share(bit)))
            return len(masks) - before
        added, last, grown, is_new = 0, -1, 0, False
        for key in keys:
            mask = masks.get(key, 0)
            if mask is not last:  # blocks of one chain mostly have the same holders
                last, grown, is_new = mask, self._share(mask | bit), not mask & bit
            masks[key] = grown
            added += is_new
        return added

    def discard(self, slot: int, keys: Iterable[int]) -> int:
        """How many of the keys the slot held."""
        masks, objects, bit = self.masks, self._objects, 1 << slot
        dropped, last, left = 0, -1, 0
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                continue
            if mask is not last:
                last, left = mask, self._share(mask ^ bit)
            dropped += 1
            if left:
                masks[key] = left
            else:
                del masks[key]
                objects.pop(key, None)
        return dropped

    def intern(self, keys: list[int]) -> list[int]:
        """The same keys, as one object each, however many slots they are for."""
        if self.masks.keys().isdisjoint(keys):
            return keys
        if len(self._objects) > len(self.masks):  # some were never added
            self._objects.clear()
        return list(map(self._objects.setdefault, keys, keys))

    def of(self, slot: int) -> list[int]:
        """The keys that a slot holds, in time proportional to all keys."""
        bit = 1 << slot
        return [key for key, mask in self.masks.items() if mask & bit]

    def bytes_used(self) -> int:
        """An estimate; the objects of the keys are counted here, whoever shares them."""
        tables = getsizeof(self.masks) + getsizeof(self._objects) + getsizeof(self._shared)
        return tables + INT_BYTES * len(self.masks)

    def counts(self) -> dict[int, int]:
        """Keys by slot, counted one by one."""
        counted: dict[int, int] = {}
        for mask in self.masks.values():
            for slot in slots_of(mask):
                counted[slot] = counted.get(slot, 0) + 1
        return counted

    def _share(self, mask: int) -> int:
        if len(self._shared) >= SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)


@lru_cache(maxsize=4096)
def slots_of(mask: int) -> tuple[int, ...]:
    return tuple(_bits(mask))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
