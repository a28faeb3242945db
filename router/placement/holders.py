"""The slots that hold each key, as a mask with the bits `1 << slot`."""

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from sys import getsizeof

# Beyond this size the table of shared masks starts anew: some equal masks then exist twice, which does no harm.
SHARED_MASKS = 65_536
INT_BYTES = 48  # of a 64-bit key


class Holders:
    """The mask of every held key; a key without holders is absent."""

    __slots__ = ("_objects", "_shared", "masks")

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._objects: dict[int, int] = {}  # of keys that were already held when stored again

    def __len__(self) -> int:
        return len(self.masks)

    def add(self, slot: int, keys: Collection[int]) -> int:
        """Add keys to a slot; return the number of those that it had not held before."""
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
        """Remove keys from a slot; return the number of those that it held."""
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
        """The same keys as one object each, shared by all slots."""
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
        """An estimate, with the objects of the keys even if others share them."""
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
