"""The resident blocks of one medium and KV-cache group of a replica."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import reduce
from operator import xor
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from events.messages import Hash

_MASK = 2**64 - 1


class Pool:
    """The blocks of one medium and KV-cache group.

    In a pool of a native replica a hash is its own key: `held` is enough, and `named` has only what got no key.
    """

    __slots__ = (
        "copies",
        "doubted",
        "group",
        "held",
        "holders",
        "medium",
        "named",
        "native",
        "spent",
        "unnamed",
        "xor",
    )

    def __init__(self, medium: str, group: int, *, native: bool = False) -> None:
        self.medium = medium
        self.group = group
        self.native = native
        self.named: dict[Hash, int | None] = {}
        self.copies: dict[Hash, int] = {}
        self.doubted: dict[Hash, int] = {}  # of these, the ones that a report would look like
        self.spent: set[Hash] = set()  # resident only if such a copy was one
        self.held: set[int] = set()
        self.holders: dict[int, int] = {}
        self.unnamed: set[int] = set()  # keys of resident blocks whose hash nobody has told
        self.xor = 0

    def __len__(self) -> int:
        """The number of resident hashes."""
        return len(self.named) + len(self.held) if self.native else len(self.named)

    def __contains__(self, block_hash: Hash) -> bool:
        return block_hash in self.named or (self.native and block_hash in self.held)

    @property
    def resident(self) -> AbstractSet[Hash]:
        """Every resident hash."""
        return self.named.keys() | self.held if self.native else self.named.keys()

    def key(self, block_hash: Hash) -> int | None:
        """The key of a resident hash, if it has one."""
        if self.native and block_hash in self.held:
            return block_hash
        return self.named.get(block_hash)

    def hold(self, keys: Iterable[int]) -> list[int]:
        """Count one more hash for each key; return the keys not held before."""
        new = []
        for key in keys:
            if key in self.held:
                self.holders[key] = self.holders.get(key, 0) + 1
            else:
                self.held.add(key)
                new.append(key)
        return new

    def drop(self, key: int) -> bool:
        """Count one hash less for the key; return True if it was the last."""
        more = self.holders.get(key)
        if more is None:
            self.held.discard(key)
            return True
        if more == 1:
            del self.holders[key]
        else:
            self.holders[key] = more - 1
        return False

    def forget_unnamed(self) -> list[int]:
        """Drop the blocks without a hash; return their keys."""
        keys, self.unnamed = list(self.unnamed), set()
        self.held.difference_update(keys)
        return keys


class Digest(NamedTuple):
    """Number of resident blocks, and XOR of their hashes (docs/wire.md)."""

    blocks: int
    xor: int


def digest_of(pools: Iterable[tuple[str, int, int, int]]) -> Digest:
    """The digest of pools given as (medium, group, blocks, XOR of the hashes).

    Those other than the GPU's group 0 are mixed with their name, or a block held twice would cancel itself out.
    """
    total, mixed = 0, 0
    for medium, group, blocks, folded in pools:
        if blocks:
            main = (medium, group) == ("GPU", 0)
            total += blocks
            mixed ^= folded if main else xxh3_64_intdigest(f"{medium}/{group}/{blocks}".encode(), folded)
    return Digest(total, mixed)


def pool_name(medium: str | None, group: int | None) -> tuple[str, int]:
    return medium or "GPU", group or 0


def fold(hashes: Iterable[Hash]) -> int:
    """XOR of the low 64 bits of a set of hashes, bytes read big-endian as the engines do."""
    return reduce(xor, map(low64, hashes), 0)


def low64(block_hash: Hash) -> int:
    return block_hash & _MASK if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
