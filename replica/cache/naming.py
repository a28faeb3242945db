"""Gives the pool's filled blocks their names and identities, as many at once as can be."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from replica.cache.chain import Chain
from replica.cache.contents import Contents, Copies
from replica.cache.lower import LowerTiers
from replica.cache.names import NOBODY, Names

NONE_KNOWN = np.zeros(0, np.int64)  # identities


class Named(NamedTuple):
    stop: int  # the block at which naming had to end
    copies: list[int]  # blocks that are copies of others


class Naming:
    """`lower` knows the identities of contents that the pool had before."""

    def __init__(self, names: Names, copies: Copies, contents: Contents, lower: LowerTiers | None) -> None:
        self._names = names
        self._copies = copies
        self._contents = contents
        self._lower = lower

    def name(self, chain: Chain, blocks: Sequence[int], start: int, stop: int) -> Named:
        """Name the chain's blocks from `start` up to `stop`, or up to one whose key another content has."""
        if stop - start > 1 and self._name_all(chain, blocks, start, stop):
            return Named(stop, [])
        return self._name_each(chain, blocks, start, stop)

    def _name_all(self, chain: Chain, blocks: Sequence[int], start: int, stop: int) -> bool:
        """As `_name_each` does, at once; False, and nothing done, unless each is the pool's first copy of its content.

        What lower media have comes first: what follows a new content is new.
        """
        known = NONE_KNOWN if self._lower is None else self._lower.identities(chain, start, stop)
        if known is None:
            return False
        keys = np.frombuffer(chain.keys, np.uint64, stop - start, start * chain.keys.itemsize)
        slots = np.array(blocks[start:stop], np.intp)
        if not self._names.add_many(keys, slots):
            return False
        self._contents.identify(chain, slots, known)
        self._contents.fill(chain, slots, start, stop)
        return True

    def _name_each(self, chain: Chain, blocks: Sequence[int], start: int, stop: int) -> Named:
        names, contents = self._names, self._contents
        copies: list[int] = []
        for index in range(start, stop):
            key, block = chain.keys[index], blocks[index]
            assert chain.identity is not None
            first = names.find(key)
            if first == NOBODY:
                names.add(key, block)
                known = self._lower.identity(chain, index) if self._lower is not None else 0
                if not known:
                    contents.last_identity += 1
                contents.identity[block] = known or contents.last_identity
            elif contents.is_same(first, chain, index):
                self._copies.add(key, block)
                contents.identity[block] = contents.identity[first]
                copies.append(index)
            else:
                chain.identity = None
                return Named(index, copies)
            contents.parent[block] = chain.identity
            chain.identity = contents.identity[block]
            contents.fill(chain, block, index, index + 1)
        return Named(stop, copies)
