"""Further blocks with the content of a named one: the oldest copy of every key is in `replica.names`."""

from collections.abc import Iterator
from itertools import chain

from replica.contents import Contents
from replica.names import Names


class Copies:
    """By key, the blocks after the oldest, as they were made."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._by_key: dict[int, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._by_key.values())

    def add(self, key: int, block: int) -> None:
        self._names.keys[block] = key
        self._by_key.setdefault(key, []).append(block)

    def drop(self, block: int) -> bool:
        """Drop one copy of several, which may be the oldest; False if it is the only one."""
        key = self._names.keys[block]
        copies = self._by_key.get(key)
        if copies is None:
            return False
        if block in copies:
            copies.remove(block)
        else:
            self._names.remove(block)
            self._names.add(key, copies.pop(0))
        if not copies:
            del self._by_key[key]
        return True

    def clear(self) -> None:
        self._by_key.clear()

    def check(self, contents: Contents) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        for key, copies in self._by_key.items():
            assert copies, f"key {key:x} has an empty list of copies"
            first = self._names.find(key)
            for copy in copies:
                assert self._names.keys[copy] == key, f"blocks {copy} and {first} differ in their key"
            contents.check_copies(first, copies)
