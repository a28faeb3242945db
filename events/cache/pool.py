"""The resident blocks of one medium and KV-cache group of a replica."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import reduce
from operator import xor
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from events.messages import Hash

_MASK = 2**64 - 1


class Removal(NamedTuple):
    """The outcome of a removal, in which a copy of each hash has gone."""

    keys: list[int]  # keys without a remaining copy
    unknown: list[Hash]
    keyless: int  # gone without a key
    doubted: int  # copies that may have been reports


class Pool:
    """The blocks of one medium and KV-cache group: which hashes are resident, how many copies, and the key of each.

    named[hash]   = key, or None while the key is not known (an orphan, or a group that cannot be paired with tokens)
    copies[hash]  = copies beyond the first
    held          = the keys of all resident hashes
    holders[key]  = hashes beyond the first with this key (an engine that salts its hashes without saying so)
    unnamed       = keys of blocks that were resident before the first known event, as a hit has proved. Their hashes
                    are not known, so a removal of any unknown hash may mean one of them, and ends all of these claims

    In a pool of a native replica a hash is its own key: `held` is enough.
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
        self.doubted: dict[Hash, int] = {}  # those among them that a report would look like
        self.spent: set[Hash] = set()  # resident only if such a copy was one
        self.held: set[int] = set()
        self.holders: dict[int, int] = {}
        self.unnamed: set[int] = set()
        self.xor = 0

    def __len__(self) -> int:
        return len(self.held if self.native else self.named)

    def __contains__(self, block_hash: Hash) -> bool:
        return block_hash in (self.held if self.native else self.named)

    @property
    def resident(self) -> AbstractSet[Hash]:
        return self.held if self.native else self.named.keys()

    def key(self, block_hash: Hash) -> int | None:
        if self.native:
            return block_hash if block_hash in self.held else None
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
        more = self.holders.get(key)
        if more is None:
            self.held.discard(key)
            return True
        if more == 1:
            del self.holders[key]
        else:
            self.holders[key] = more - 1
        return False

    # ---- stores

    def add_new(self, hashes: list[Hash], keys: list[int]) -> bool:
        """The common case at C speed: no hash and no key was there before, or twice in the event; else does nothing."""
        named, held = self.named, self.held
        if (named and not named.keys().isdisjoint(hashes)) or not held.isdisjoint(keys):
            return False
        blocks, held_before = len(named) + len(hashes), len(held)
        held.update(keys)
        if not self.native:
            named.update(zip(hashes, keys, strict=True))
        if len(held) - held_before != len(keys) or not (self.native or len(named) == blocks):
            held.difference_update(keys)
            for block_hash in hashes:
                named.pop(block_hash, None)
            return False
        if self.native:
            self.xor = reduce(xor, keys, self.xor)
        return True

    def announce(self, hashes: Iterable[Hash]) -> int:
        """Add a copy of each hash without a known key; return how many were resident."""
        resident = 0
        for block_hash in hashes:
            if block_hash not in self:
                if self.native:
                    self.xor ^= low64(block_hash)
                else:
                    self.named[block_hash] = None
                continue
            resident += 1
            self.copies[block_hash] = self.copies.get(block_hash, 0) + 1
        return resident

    def assign(self, block_hash: Hash, key: int) -> list[int] | None:
        """Assign a key to a resident hash; return the key if it is new to the pool, None if the hash has another."""
        old = self.key(block_hash)
        if old is not None:
            return [] if old == key else None
        if not self.native:
            self.named[block_hash] = key
        if key in self.unnamed:  # this may report it, or store it a second time: one of them is claimed
            self.unnamed.remove(key)
            return []
        return self.hold([key])

    # ---- removals

    def remove(self, hashes: Iterable[Hash]) -> Removal:
        copies = self.copies
        keys: list[int] = []
        unknown: list[Hash] = []
        keyless = doubted = 0
        for block_hash in hashes:
            more = copies.get(block_hash)
            if more is not None:
                if more == 1:
                    del copies[block_hash]
                else:
                    copies[block_hash] = more - 1
                # If those left may all be reports, what keeps the block resident is in doubt, too.
                if self.doubted and self.doubted.get(block_hash, 0) >= more:
                    self.spent.add(block_hash)
                    self.doubted[block_hash] -= 1
                    if not self.doubted[block_hash]:
                        del self.doubted[block_hash]
                    doubted += 1
            elif block_hash in self:
                key = self.key(block_hash)
                self.named.pop(block_hash, None)
                if self.spent:
                    self.spent.discard(block_hash)
                if self.native:
                    self.xor ^= low64(block_hash)
                if key is None:
                    keyless += 1
                elif self.drop(key):
                    keys.append(key)
            else:
                unknown.append(block_hash)
        return Removal(keys, unknown, keyless, doubted)

    # ---- blocks without a hash

    def hold_unnamed(self, keys: list[int]) -> None:
        """Claim blocks whose hashes nobody has told; none of the keys is held."""
        self.unnamed.update(keys)
        self.held.update(keys)

    def forget_unnamed(self) -> list[int]:
        keys, self.unnamed = list(self.unnamed), set()
        self.held.difference_update(keys)
        return keys

    # ---- copies that may be reports

    def doubt(self, hashes: Iterable[Hash]) -> None:
        for block_hash in hashes:
            self.doubted[block_hash] = self.doubted.get(block_hash, 0) + 1

    def take_back(self) -> list[Hash]:
        """Such copies were reports: count them no more; return the hashes that nothing but one kept resident."""
        for block_hash, count in self.doubted.items():
            if (left := self.copies.get(block_hash, 0) - count) > 0:
                self.copies[block_hash] = left
            else:
                self.copies.pop(block_hash, None)
        spent, self.spent, self.doubted = self.spent, set(), {}
        return [block_hash for block_hash in spent if block_hash in self.named]

    def settle(self) -> int:
        """No block has a second copy; return how many were counted that may have been reports."""
        doubted = sum(self.doubted.values())
        self.copies.clear()
        self.doubted.clear()
        return doubted

    def check(self) -> None:
        keys = [key for key in map(self.key, self.resident) if key is not None]
        assert self.held == self.unnamed | set(keys), f"{self.medium}: held keys are not those of the resident blocks"
        assert self.unnamed.isdisjoint(keys), f"{self.medium}: a block whose hash is known counts as unnamed"
        extra = {key: count - 1 for key, count in Counter(keys).items() if count > 1}
        assert self.holders == extra, f"{self.medium}: holders {self.holders} but {extra} was counted"
        assert self.copies.keys() <= self.resident, f"{self.medium}: copies of a block that is not resident"
        assert len(self) == len(self.resident), f"{self.medium}: a hash is counted twice"
        assert all(count > 0 for count in self.copies.values()), f"{self.medium}: a copy count below one"
        assert not self.native or self.xor == fold(self.resident), f"{self.medium}: the digest drifted"


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
