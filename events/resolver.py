"""Turns one replica's events into changes of block keys.

The engine names a block by a hash of its own; the rest of the system by its key (`blocks.py`). The resolver keeps, for
every pool of the replica (a medium and a KV-cache group), which hashes are resident, how many copies of each, and the
key of each. It never guesses: what cannot be given a key is counted and waits, or is said to be inexact.

    named[hash]    = key, or None while the key is not known (an orphan, or a group that cannot be paired with tokens);
                     of a native replica only those without a key, as its other hashes are keys
    copies[hash]   = copies beyond the first
    held           = the keys of all resident hashes
    holders[key]   = hashes beyond the first with this key (an engine that salts its hashes without saying so)
    unnamed        = keys of blocks that were resident before the first known event, as a hit has proved. Their hashes
                     are not known, so a removal of any unknown hash may mean one of them, and ends all of these claims
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import takewhile
from operator import xor
from typing import NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from events.doubtful import Doubtful
from events.extras import block_of, chain_keys, chain_root, unit_keys
from events.groups import FULL, RULES, Groups, Layout, hits, said_of
from events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Hash,
    RejectedEvent,
    UnknownEvent,
    decode_tokens,
)
from events.orphans import Orphans
from events.pool import Digest, Pool, digest_of, fold, low64, pool_name
from events.reports import Reports
from events.slices import StoredPiece
from events.vllm_hashes import HashChain

REMOTE = "REMOTE"  # the locality of blocks in a place that replicas share
MOST_BLOCKS = 2**21  # of one replica, in all media: its views take a gigabyte then
TOO_MANY_BLOCKS = "it says it holds more than {:,} blocks, which is the most that is kept of a replica"
MOST_POOLS = 64
MOST_MEDIA = 8  # every prompt is looked up in each of them
MOST_MEDIUM_CHARS = 64
SLACK_BLOCKS = 64  # beside a twentieth: what an engine announces before it has evicted for it


class Grouped(NamedTuple):
    """The replica's groups are these from now on; None: one that keeps whole prefixes."""

    layout: Layout | None


class Stored(NamedTuple):
    """Blocks that got a key. `chain` has the key of every block of the event, `keys` those new in this pool."""

    medium: str
    keys: list[int]
    chain: list[int]
    parent_key: int
    event: BlockStored
    group: int = 0


class Removed(NamedTuple):
    """Keys without a remaining copy in this pool."""

    medium: str
    keys: list[int]
    group: int = 0


class Held(NamedTuple):
    """The keys of one pool."""

    medium: str
    group: int
    keys: set[int]


class Cleared(NamedTuple):
    """The whole cache is empty. `held` has the sets of keys that were held until now, by pool; yours to keep."""

    held: tuple[Held, ...] = ()


Change: TypeAlias = Stored | Removed | Cleared | Grouped


class ResolverStats(Struct):
    stored_blocks: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    duplicate_blocks: int = 0
    orphan_blocks: int = 0
    orphans_resolved: int = 0
    orphans_dropped: int = 0
    unpaired_blocks: int = 0
    reported_blocks: int = 0  # resident ones, told again because a request asked for it
    removed_unknown: int = 0
    unknown_events: int = 0
    rejected_events: int = 0
    remote_blocks: int = 0  # stored or removed in a place that is not the replica's own
    refused_blocks: int = 0  # beyond what the replica can hold


class Resolver:
    """One replica's hashes, resolved to keys.

    `native`: the replica's hashes are block keys already, so neither tokens nor parents are needed.
    `keyed`: so are those of groups that keep part of a prefix (a redacted recording).
    `reannounces`: the engine reports blocks again when they are hit, so copies cannot be counted (said to be inexact).
    `intern`: gives equal keys, so that many resolvers may keep one object for each.
    """

    def __init__(
        self,
        model: str = "",
        *,
        native: bool = False,
        keyed: bool = False,
        reannounces: bool = False,
        orphan_limit: int = 100_000,
        intern: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        self.model = model
        self.native = native
        self.keyed = keyed
        self.reannounces = reannounces
        self.stats = ResolverStats()
        self.lost: str | None = None
        self.overclaim: str | None = None  # it has claimed more than it can hold
        self.full: str | None = None  # it has more than is kept
        self.outgrown: str | None = None  # its blocks have keys of another size than its prompts now
        self.speculates = False  # it drafts tokens, by whichever method
        self.gpu_blocks: int | None = None  # what it says its GPU pool has room for
        self.cacheable_blocks: int | None = None  # those of them that can hold a prefix; None: unknown
        self.complete = False  # after a loss, the whole cache has been known at one moment
        self.unknown_removals = 0  # of blocks whose key was not known
        self.pools: dict[tuple[str, int], Pool] = {}
        self.groups = Groups()
        self.reports = Reports()
        self._orphans = Orphans(orphan_limit)
        self._hash_chain = HashChain()
        self._intern = intern
        self._verified: bool | None = None
        self._has_lost = False  # there may be blocks that nobody told of
        self._doubtful = Doubtful()
        self._pools_before: set[tuple[str, int]] = set()  # the loss

    @property
    def inexact(self) -> str | None:
        """The reason for not trusting the resident set, or None."""
        if self.overclaim is not None:
            return self.overclaim
        if self.reannounces:
            return "the engine announces hits again as stores: copies cannot be counted"
        return (
            self.lost or self.full or self.outgrown or self.groups.doubt or self._doubtful_reports() or self._dropped()
        )

    @property
    def orphan_blocks(self) -> int:
        """The number of blocks that wait for their parent."""
        return self._orphans.blocks

    def held(self) -> tuple[Held, ...]:
        """The keys of every pool that holds any."""
        return tuple(Held(pool.medium, pool.group, pool.held) for pool in self.pools.values() if pool.held)

    def reset(self) -> Cleared:
        cleared = Cleared(self.held())
        self.pools.clear()
        self._orphans.clear()
        self._verified = None
        self.lost = self.overclaim = self.full = self.outgrown = None
        self.reports.copies = 0
        self._all_is_known()
        self.complete = False
        return cleared

    @property
    def has_doubtful(self) -> bool:
        """True if blocks are known that may have gone at a loss."""
        return bool(self._doubtful)

    def lose(self) -> Cleared:
        """Forget blocks that may be gone since events were lost; only what is stored from now on is claimed."""
        pools, doubtful = self.pools.copy(), self._doubtful
        before = self._pools_before | pools.keys()
        self._doubtful = Doubtful()
        cleared = self.reset()
        self._has_lost, self._doubtful, self._pools_before = True, doubtful, before
        plain = not self.native and self.groups.layout is None  # of other groups a hit does not prove every block
        if plain and (pool := pools.get(("GPU", 0))) is not None:
            doubtful.add(pool, MOST_BLOCKS)
        return cleared

    @property
    def learns_from_hits(self) -> bool:
        """True if blocks of its only group may be resident that no event has told of."""
        plain = not self.native and not self.reannounces and self.groups.layout is None
        return self._has_lost and plain and self._pools_before | self.pools.keys() <= {("GPU", 0)}

    def found(self, keys: Sequence[int], *, proved: bool = False) -> list[int]:
        """Take blocks as resident that the replica has reused since the loss; return the keys new here.

        `proved`: no unknown block and none of these was removed since, so they are resident whatever their hashes are.
        """
        pool = self._pool("GPU", 0)
        blocks = [(one, key) for one, key in self._doubtful.take(keys) if one not in pool]
        pool.named.update(blocks)
        new = pool.hold(key for _, key in blocks)
        if not proved or not self.learns_from_hits:
            return new
        fresh = [key for key in dict.fromkeys(keys) if key not in pool.held][: max(0, self._room(pool))]
        fresh = fresh if self._intern is None else self._intern(fresh)
        pool.unnamed.update(fresh)
        pool.held.update(fresh)
        return new + fresh

    def _room(self, pool: Pool) -> int:
        """Blocks that this pool may hold beside those known."""
        most = self.cacheable_blocks or self.gpu_blocks or MOST_BLOCKS
        return min(most, MOST_BLOCKS) - len(pool) - len(pool.unnamed)

    def _forget_unnamed(self, pool: Pool, changes: list[Change]) -> None:
        if pool.unnamed:
            changes.append(Removed(pool.medium, pool.forget_unnamed(), pool.group))

    def limit(self, gpu_blocks: int | None, cacheable_blocks: int | None = None) -> None:
        """Take no more blocks of GPU memory than these from now on; None: the size of its pool is not known.

        `cacheable_blocks`: those of them that can hold a prefix.
        """
        self.gpu_blocks, self.cacheable_blocks = gpu_blocks, cacheable_blocks
        self._excess("GPU", 0)

    def apply(self, events: Iterable[Event]) -> list[Change]:
        if not isinstance(events, list):
            events = list(events)
        changes: list[Change] = []
        known, looked = self.groups.known, False
        for event in events:
            if isinstance(event, BlockStored):
                if said_of(event) not in known:
                    self._learn([event] if looked else events, changes)
                    looked = True
                self._store(event, changes)
                if self._has_lost:
                    self._look_for_turnover(changes)
            elif isinstance(event, BlockRemoved):
                self._remove(event, changes)
            elif isinstance(event, AllBlocksCleared):
                self.stats.cleared += 1
                changes.append(self.reset())
            elif isinstance(event, RejectedEvent):
                self.stats.rejected_events += 1
                self.lost = f"an event could not be read: {event.reason}"
            elif isinstance(event, UnknownEvent):
                self.stats.unknown_events += 1
        self.reports.latest = None  # what follows in another batch may have been computed in between
        return changes

    def resident_blocks(self) -> int:
        return sum(map(len, self.pools.values()))

    def keys(self, medium: str = "GPU") -> set[int]:
        """The keys a medium holds."""
        return {key for held in self.held() if held.medium == medium for key in held.keys}

    def matched(self, keys: Sequence[int], medium: str = "GPU") -> int:
        """Count the leading blocks of a prompt that the medium holds, in units of its layout if it has groups."""
        held = {pool.group: pool.held for pool in self.pools.values() if pool.medium == medium}
        if self.groups.layout is None:
            return sum(1 for _ in takewhile(held.get(0, set()).__contains__, keys))

        def masks_of(group: int, wanted: Sequence[int]) -> list[int]:
            return [int(key in held.get(group, ())) for key in wanted]

        return hits(self.groups.layout, keys, masks_of, 1).get(0, 0)

    def digest(self) -> Digest:
        pools = self.pools.values()
        return digest_of(
            (pool.medium, pool.group, len(pool), pool.xor if self.native else fold(pool.resident)) for pool in pools
        )

    # ---- groups

    def restarted(self) -> None:
        """Forget what the groups are, and whether there are reports: another process may follow."""
        self.groups.forget()
        self.reports.forget()
        self._hash_chain = HashChain()
        self.cacheable_blocks = None  # its pool may have another size

    def _learn(self, events: list[Event], changes: list[Change]) -> None:
        """Look at all of a batch's groups before any block gets a key: they decide the size of the blocks."""
        before = self.groups.key_sizes
        learn = self.groups.learn
        if True in [learn(event) for event in events if isinstance(event, BlockStored)]:
            changes.append(Grouped(self.groups.layout))
            for pool in self.pools.values():
                self._forget_unnamed(pool, changes)
            if before not in ((), self.groups.key_sizes) and self.resident_blocks():
                self.outgrown = "its groups have turned out to have other block sizes than its first events said"

    # ---- stores

    def _store(self, event: BlockStored, changes: list[Change]) -> None:
        hashes = event.block_hashes
        if event.locality == REMOTE:
            self.stats.remote_blocks += len(hashes)
            return
        if not hashes:
            if self.groups.sparse and event.token_ids and not self.native:  # later blocks follow these
                self._hashed(event)
            return
        pool = self._pool_with_room(event)
        if pool is None:
            self.stats.refused_blocks += len(hashes)
            return
        self.stats.stored_blocks += len(hashes)
        if (
            (hashes[0] in pool.named or self.reports.latest is not None)
            and not self.native
            and not self.groups.sparse
            and pool.medium == "GPU"
            and self._is_report(event, pool, changes)
        ):
            return
        trusted = self.native and (self.keyed or RULES.get(event.kv_cache_spec_kind or "full_attention") == FULL)
        if trusted and self._are_keys(event):
            keys: list[int] = hashes  # type: ignore[assignment]
            parent = event.parent_block_hash
            parent_key = parent if isinstance(parent, int) else chain_root(event, self.model)
        else:
            named = None if trusted else self._resolve(event, pool, changes)
            if named is None:
                return
            parent_key, keys = named
        new = self._name(pool, hashes, keys)
        changes.append(Stored(pool.medium, new, keys, parent_key, event, pool.group))
        if self._orphans:
            self._wake(hashes, keys, changes)

    def _resolve(self, event: BlockStored, pool: Pool, changes: list[Change]) -> tuple[int, list[int]] | None:
        """The parent's key and the blocks' own; if there are none (yet), the blocks are announced without a key."""
        hashes = event.block_hashes
        size, layout = event.block_size, self.groups.layout
        if self.native:
            self.stats.unpaired_blocks += len(hashes)
        elif not event.token_ids:
            self._store_without_tokens(event, pool, changes)
            return None
        elif pool.medium != "GPU" and (found := self._resolve_below(event)) is not None:
            return found
        elif self.groups.sparse:
            self._store_hashed(event, pool, changes)
            return None
        elif len(event.token_ids) != size * len(hashes):
            if layout is not None:
                self._store_sparse(event, pool, changes)
                return None
            self.stats.unpaired_blocks += len(hashes)
        else:
            parent = event.parent_block_hash
            if parent is None:
                parent_key: int | None = self._root(event)
            elif isinstance(event, StoredPiece) and event.start:
                parent_key = event.whole.last_key if event.whole.named_blocks == event.start else None
            elif (parent_key := pool.named.get(parent)) is None and (parent_key := self._key(parent)) is None:
                self._wait(parent, event.whole.event if isinstance(event, StoredPiece) else event)
            if parent_key is not None:
                if (keys := self._chain(event, parent_key)) is not None:
                    if isinstance(event, StoredPiece):
                        event.whole.named_blocks, event.whole.last_key = event.start + len(keys), keys[-1]
                    return parent_key, keys
                if layout is not None and size != layout.unit:
                    self._store_sparse(event, pool, changes)
                    return None
                self.stats.unpaired_blocks += len(hashes)
        self._announce(pool, hashes)
        return None

    def _resolve_below(self, event: BlockStored) -> tuple[int, list[int]] | None:
        """The same in a lower medium, whose events leave salts and images out: a hash that is known names its block.

        Only a block that is not known by its hash is named by the one before and by its tokens.
        """
        size, hashes = event.block_size, event.block_hashes
        if len(event.token_ids) != size * len(hashes):
            return None
        parent = event.parent_block_hash
        if isinstance(event, StoredPiece) and event.start:
            if event.whole.named_blocks != event.start:
                return None
            above: int | None = event.whole.last_key
        else:
            above = self._root(event) if parent is None else self._key(parent)
        named: dict[Hash, int] = {}
        keys: list[int] = []
        last = above
        for index, block_hash in enumerate(hashes):
            key = self._key(block_hash) or named.get(block_hash)
            if key is None:
                made = None if last is None else self._chain(block_of(event, index), last)
                if not made:
                    return None
                key = named[block_hash] = made[0]
            keys.append(key)
            last = key
        if isinstance(event, StoredPiece):
            event.whole.named_blocks, event.whole.last_key = event.start + len(keys), keys[-1]
        return above or 0, keys

    def _chain(self, event: BlockStored, parent_key: int) -> list[int] | None:
        """The keys of the event's blocks, or None if its tokens cannot be paired with its hashes."""
        layout = self.groups.layout
        return chain_keys(event, parent_key) if layout is None else unit_keys(event, parent_key, layout.unit)

    def _name(self, pool: Pool, hashes: list[Hash], keys: list[int]) -> list[int]:
        """Add a copy of each hash with a known key; return keys new to the pool."""
        if self._intern is not None:
            keys = self._intern(keys)
        if self._name_all_new(pool, hashes, keys):
            return keys
        new: list[int] = []
        for block_hash, key in zip(hashes, keys, strict=True):
            self._announce(pool, [block_hash])
            new += self._assign(pool, block_hash, key)
        return new

    def _name_all_new(self, pool: Pool, hashes: list[Hash], keys: list[int]) -> bool:
        """The common case at C speed: no hash and no key was there before, or twice in the event; else does nothing."""
        named, held = pool.named, pool.held
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
            pool.xor = reduce(xor, keys, pool.xor)
        return True

    def _announce(self, pool: Pool, hashes: list[Hash]) -> None:
        """Add a copy of each hash without a known key."""
        for block_hash in hashes:
            if block_hash not in pool:
                pool.named[block_hash] = None
                if self.native:
                    pool.xor ^= low64(block_hash)
                continue
            self.stats.duplicate_blocks += 1
            if not self.reannounces:
                pool.copies[block_hash] = pool.copies.get(block_hash, 0) + 1

    def _assign(self, pool: Pool, block_hash: Hash, key: int) -> list[int]:
        """Assign a key to a resident hash; return the key if it is new to the pool."""
        old = pool.key(block_hash)
        if old == key:
            return []
        if old is not None:
            self.lost = f"block {block_hash!r} was announced twice with different tokens"
            return []
        if self.native:
            del pool.named[block_hash]
        else:
            pool.named[block_hash] = key
        if key in pool.unnamed:  # this may report it, or store it a second time: one of them is claimed
            pool.unnamed.remove(key)
            return []
        return pool.hold([key])

    def _store_without_tokens(self, event: BlockStored, pool: Pool, changes: list[Change]) -> None:
        """Blocks named by hash alone: their keys are known from another tier or group, now or later."""
        self._announce(pool, event.block_hashes)
        keys, new = [], []
        for block_hash in event.block_hashes:
            key = self._key(block_hash)
            if key is None:
                self._wait(block_hash, event)
            else:
                keys.append(key)
                new += self._assign(pool, block_hash, key)
        if keys:
            changes.append(Stored(pool.medium, new, keys, 0, event, pool.group))

    def _store_sparse(self, event: BlockStored, pool: Pool, changes: list[Change]) -> None:
        """Blocks that cannot be paired with the event's tokens: a group with all of them names the same hashes."""
        self._store_without_tokens(replace(event, token_ids=[]), pool, changes)

    def _store_hashed(self, event: BlockStored, pool: Pool, changes: list[Change]) -> None:
        """Blocks among those that the event describes; no group names all of them."""
        names = self._hashed(event)
        if names is None:
            self._announce(pool, event.block_hashes)
            return
        if self._ends_in_a_hit(event, pool):
            self.reports.seen = True
            self.stats.reported_blocks += len(event.block_hashes)
            return
        new = self._name(pool, event.block_hashes, [names[low64(block_hash)] for block_hash in event.block_hashes])
        before = self._key(event.parent_block_hash) if event.parent_block_hash is not None else self._root(event)
        changes.append(Stored(pool.medium, new, list(names.values()), before or 0, event, pool.group))

    def _hashed(self, event: BlockStored) -> dict[int, int] | None:
        """The keys of all blocks that the event describes, by the last 64 bits of their hashes."""
        layout, names = self.groups.layout, None
        if layout is not None and event.block_size == layout.unit:
            pool = self.pools.get(pool_name(event.medium, event.group_idx))
            names = self._hash_chain.names(event, self._root(event), () if pool is None else pool.named)
        if names is None:
            self.lost = (
                f"group {event.group_idx or 0} keeps some of the blocks that its events describe and does not say "
                "which, and their hashes are not of vLLM's sha256 without PYTHONHASHSEED"
            )
        return names

    def _root(self, event: BlockStored) -> int:
        layout = self.groups.layout
        return chain_root(event, self.model, event.block_size if layout is None else layout.unit)

    def _key(self, block_hash: Hash) -> int | None:
        for pool in self.pools.values():
            key = pool.key(block_hash)
            if key is not None:
                return key
        return self._doubtful.keys.get(block_hash)

    def _are_keys(self, event: BlockStored) -> bool:
        """Verify a native replica's hashes on the first chain from a root; if they are wrong, no block gets a key."""
        if self._verified is None and event.parent_block_hash is None:
            try:
                full = decode_tokens(event)
                self._verified = chain_keys(full, chain_root(full, self.model)) == event.block_hashes
            except ValueError:
                self._verified = False
        if self._verified is False or not _can_be_keys(event.block_hashes):
            self.lost = f"the replica's hashes are not block keys of model {self.model!r} as it claims"
            return False
        return True

    # ---- reports of resident blocks

    def _ends_in_a_hit(self, event: BlockStored, pool: Pool) -> bool:
        """Return True for all blocks of a prefix that could be a hit: nobody computes them, so they are reported."""
        layout, hashes = self.groups.layout, event.block_hashes
        if layout is None or event.parent_block_hash is not None:
            return False
        if len(event.token_ids) != event.block_size * len(hashes):
            return False
        needed = max([1, *(group.blocks for group in layout.groups if group.group == pool.group)])
        return pool.named.keys() >= set(hashes[-needed:])

    def _doubtful_reports(self) -> str | None:
        """Reports of a group that keeps part of a prefix name blocks that it does not hold."""
        layout = self.groups.layout
        if layout is None or layout.whole or not self.reports.seen:
            return None
        return "requests ask for reports of cached blocks, which name blocks that some of its groups do not hold"

    def _is_report(self, event: BlockStored, pool: Pool, changes: list[Change]) -> bool:
        """Return True if the event only reports blocks; copies that may be reports are counted apart."""
        reports = self.reports
        if reports.proves(event, pool):
            self._reports_seen(changes)
        if not reports.like(event, pool) or self.reannounces:
            return False
        if not reports.seen:
            for block_hash in event.block_hashes:
                pool.doubted[block_hash] = pool.doubted.get(block_hash, 0) + 1
            reports.copies += len(event.block_hashes)
            if self.gpu_blocks is None or self.resident_blocks() + reports.copies <= self.gpu_blocks:
                return False
            self._reports_seen(changes)  # so many copies have no room there
        self.stats.reported_blocks += len(event.block_hashes)
        return True

    def _reports_seen(self, changes: list[Change]) -> None:
        """The engine is asked for reports: take back the copies that looked like one."""
        self.reports.seen, self.reports.copies = True, 0
        for pool in self.pools.values():
            for block_hash, count in pool.doubted.items():
                if (left := pool.copies.get(block_hash, 0) - count) > 0:
                    pool.copies[block_hash] = left
                else:
                    pool.copies.pop(block_hash, None)
            spent, pool.spent, pool.doubted = pool.spent, set(), {}
            self._drop(pool, spent & pool.named.keys(), changes)

    def _dropped(self) -> str | None:
        """Without hashes that look ahead, vLLM computes the last block of a hit again for EAGLE and MTP."""
        layout = self.groups.layout
        if not self.speculates or not self.pools or (layout is not None and layout.lookahead):
            return None
        return "it speculates, and its hashes do not look ahead: with EAGLE or MTP a hit is a block shorter"

    # ---- orphans

    def _wait(self, for_hash: Hash, event: BlockStored) -> None:
        self.stats.orphan_blocks += len(event.block_hashes) if event.token_ids else 1
        if dropped := self._orphans.add(for_hash, event, self._is_resident):
            self.stats.orphans_dropped += dropped
            self.lost = f"more than {self._orphans.limit} blocks waited for their parent; the oldest were dropped"

    def _is_resident(self, event: BlockStored) -> bool:
        pool = self._pool(event.medium, event.group_idx)
        return any(block_hash in pool for block_hash in event.block_hashes)

    def _wake(self, hashes: list[Hash], keys: list[int], changes: list[Change]) -> None:
        """Name blocks that waited for these hashes, and recursively their children."""
        todo = list(zip(hashes, keys, strict=True))
        while todo:
            block_hash, key = todo.pop()
            for event in self._orphans.take(block_hash):
                self.stats.orphans_resolved += 1
                pool = self._pool(event.medium, event.group_idx)
                chain = self._chain(event, key) if event.token_ids else [key]
                if chain is None:
                    self.stats.unpaired_blocks += len(event.block_hashes)
                    continue
                named = event.block_hashes if event.token_ids else [block_hash]
                new: list[int] = []
                for child, child_key in zip(named, chain, strict=True):
                    if child in pool:  # it may have been removed while it waited
                        new += self._assign(pool, child, child_key)
                changes.append(Stored(pool.medium, new, chain, key if event.token_ids else 0, event, pool.group))
                todo += zip(named, chain, strict=True)

    # ---- removals

    def _remove(self, event: BlockRemoved, changes: list[Change]) -> None:
        if event.locality == REMOTE:
            self.stats.remote_blocks += len(event.block_hashes)
            return
        self.stats.removed_blocks += len(event.block_hashes)
        pool = self.pools.get(pool_name(event.medium, event.group_idx))
        if pool is None:
            self.stats.removed_unknown += len(event.block_hashes)
            self._gone(event.block_hashes)
            return
        self._drop(pool, event.block_hashes, changes)

    def _drop(self, pool: Pool, hashes: Iterable[Hash], changes: list[Change]) -> None:
        """Remove a copy of each hash."""
        copies = pool.copies
        keys: list[int] = []
        for block_hash in hashes:
            more = copies.get(block_hash)
            if more is not None:
                if more == 1:
                    del copies[block_hash]
                else:
                    copies[block_hash] = more - 1
                if pool.doubted:
                    self._spend(pool, block_hash)
            elif block_hash in pool:
                key = pool.key(block_hash)
                pool.named.pop(block_hash, None)
                if pool.spent:
                    pool.spent.discard(block_hash)
                if self.native:
                    pool.xor ^= low64(block_hash)
                if key is None:
                    self._orphans.gone += 1
                elif pool.drop(key):
                    keys.append(key)
            else:
                self.stats.removed_unknown += 1
                if self._gone((block_hash,)) and pool.unnamed:
                    keys += pool.forget_unnamed()
                if self.reports.seen and not self._has_lost:
                    self.lost = "a block was removed twice whose second store was taken for a report of the first"
        if keys:
            changes.append(Removed(pool.medium, keys, pool.group))

    def _spend(self, pool: Pool, block_hash: Hash) -> None:
        """A copy is gone: if those left may all be reports, what keeps the block resident is in doubt, too."""
        doubted = pool.doubted.get(block_hash, 0)
        if doubted > pool.copies.get(block_hash, 0):
            self.reports.copies -= 1
            pool.spent.add(block_hash)
            if doubted == 1:
                del pool.doubted[block_hash]
            else:
                pool.doubted[block_hash] = doubted - 1

    # ---- after a loss

    def _gone(self, hashes: Iterable[Hash]) -> int:
        """Note removals of blocks that are not known to be resident; return how many have no known key."""
        unknown = sum(not self._doubtful.gone(block_hash) for block_hash in hashes)
        self.unknown_removals += unknown
        return unknown

    def _look_for_turnover(self, changes: list[Change]) -> None:
        """Look whether the known blocks fill the replica's pool: then there are no others, and no second copies.

        This needs a single pool, in which every block has one hash.
        """
        for pool in self.pools.values():
            if pool.unnamed and (not self.learns_from_hits or self._room(pool) < 0):
                self._forget_unnamed(pool, changes)
        if self.cacheable_blocks is None or self._pools_before | self.pools.keys() != {("GPU", 0)}:
            return
        pool = self.pools[("GPU", 0)]
        if len(pool) == self.cacheable_blocks and not pool.spent:
            self.reports.copies -= sum(pool.doubted.values())
            pool.copies.clear()
            pool.doubted.clear()
            self.complete = True
            self._all_is_known()

    def _all_is_known(self) -> None:
        self._has_lost = False
        self._doubtful.clear()
        self._pools_before = set()

    # ---- what it can hold

    def _pool_with_room(self, event: BlockStored) -> Pool | None:
        """Return the event's pool, or None, noting the reason, if the replica cannot hold that much."""
        name = pool_name(event.medium, event.group_idx)
        pool = self.pools.get(name)
        if pool is None:
            media = {medium for medium, _ in self.pools} | {name[0]}
            if len(self.pools) >= MOST_POOLS or len(media) > MOST_MEDIA or len(name[0]) > MOST_MEDIUM_CHARS:
                self.overclaim = f"it claims more than {MOST_MEDIA} media or {MOST_POOLS} pools of blocks"
                return None
            pool = self._pool(event.medium, event.group_idx)
        elif len(self.pools) == 1 and len(pool) + len(event.block_hashes) <= min(
            self.gpu_blocks or MOST_BLOCKS, MOST_BLOCKS
        ):
            return pool  # without adding up
        if not self._excess(pool.medium, len(event.block_hashes)):
            return pool
        more = sum(block_hash not in pool for block_hash in event.block_hashes)  # copies take no room here
        return None if more and self._excess(pool.medium, more, say=True) else pool

    def proved(self) -> None:
        """The digest is the replica's: blocks that were refused are no longer held there."""
        self.overclaim = self.full = None

    def is_too_small_for(self, blocks: int) -> bool:
        """Return whether re-reading a replica with this many blocks would exceed the limits again."""
        if blocks > MOST_BLOCKS:
            self.full = TOO_MANY_BLOCKS.format(MOST_BLOCKS)
            return True
        more = blocks - self.resident_blocks()
        return self.overclaim is not None and more > 0 and self._excess("GPU", more)

    def _excess(self, medium: str, more: int, *, say: bool = False) -> bool:
        """Return True if that would be more than it can hold, or than is kept of it."""
        total = more + self.resident_blocks()
        say = say or not more
        if medium == "GPU" and self.gpu_blocks is not None and total > self.gpu_blocks:
            most = self.gpu_blocks + self.gpu_blocks // 20 + SLACK_BLOCKS
            if more + sum(len(pool) for pool in self.pools.values() if pool.medium == "GPU") > most:
                if say:
                    self.overclaim = f"it claims to hold more than the {self.gpu_blocks:,} blocks that its pool has"
                return True
        if total <= MOST_BLOCKS:
            return False
        if say:  # it may well hold them
            self.full = TOO_MANY_BLOCKS.format(MOST_BLOCKS)
        return True

    # ---- the rest

    def _pool(self, medium: str | None, group: int | None) -> Pool:
        name = pool_name(medium, group)
        pool = self.pools.get(name)
        if pool is None:
            pool = self.pools[name] = Pool(*name, native=self.native)
        return pool

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        for pool in self.pools.values():
            keys = [key for key in map(pool.key, pool.resident) if key is not None]
            assert pool.held == pool.unnamed | set(keys), (
                f"{pool.medium}: held keys are not those of the resident blocks"
            )
            assert pool.unnamed.isdisjoint(keys), f"{pool.medium}: a block whose hash is known counts as unnamed"
            extra = {key: count - 1 for key, count in Counter(keys).items() if count > 1}
            assert pool.holders == extra, f"{pool.medium}: holders {pool.holders} but {extra} was counted"
            assert pool.copies.keys() <= pool.resident, f"{pool.medium}: copies of a block that is not resident"
            assert len(pool) == len(pool.resident), f"{pool.medium}: a hash is counted twice"
            assert all(count > 0 for count in pool.copies.values()), f"{pool.medium}: a copy count below one"
            assert not self.native or pool.xor == fold(pool.resident), f"{pool.medium}: the digest drifted"
        self._orphans.check()


def _can_be_keys(hashes: list[Hash]) -> bool:
    try:
        return min(hashes) >= 0  # type: ignore[operator]
    except TypeError:  # bytes are among them
        return False
