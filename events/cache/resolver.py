"""Turns one replica's events into changes of block keys.

The engine names a block by a hash of its own; the rest of the system by its key (`blocks.py`). The resolver keeps, for
every pool of the replica (`pool.py`), which hashes are resident, how many copies of each, and the key of each. It never
guesses: what cannot be given a key is counted and waits, or is said to be inexact.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from events.cache.changes import Change, Cleared, Grouped, Held, Removed, Stored
from events.cache.groups import Groups, said_of
from events.cache.hash_chain import HashChain
from events.cache.naming import Doubtful, Naming
from events.cache.orphans import Orphans, Reports, ends_in_a_hit
from events.cache.pool import Digest, Pool, low64, pool_name
from events.cache.pools import MAX_BLOCKS, Capacity, Pools, ResolverStats
from events.messages import (
    REMOTE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Hash,
    RejectedEvent,
    UnknownEvent,
)


class Resolver:
    """One replica's hashes, resolved to keys.

    `native`: the replica's hashes are block keys already, so neither tokens nor parents are needed.
    `intern`: gives equal keys, so that many resolvers may keep one object for each.
    """

    def __init__(
        self,
        model: str = "",
        *,
        native: bool = False,
        orphan_limit: int = 100_000,
        intern: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        self.native = native
        self.stats = ResolverStats()
        self.lost: str | None = None
        self.outgrown: str | None = None  # its blocks have keys of another size than its prompts now
        self.speculates = False  # it drafts tokens, by whichever method
        self.complete = False  # after a loss, the whole cache has been known at one moment
        self.pools = Pools(native=native)
        self.capacity = Capacity(self.pools)
        self.groups = Groups()
        self.doubtful = Doubtful()
        self.naming = Naming(model, self.pools, self.groups, self.doubtful)
        self.reports = Reports()
        self._orphans = Orphans(orphan_limit, self.pools, self.naming, self.stats)
        self._intern = intern

    @property
    def inexact(self) -> str | None:
        """The reason for not trusting the resident set, or None."""
        if self.capacity.overclaim is not None:
            return self.capacity.overclaim
        layout = self.groups.layout
        doubt = self.lost or self.capacity.full or self.outgrown or self.groups.doubt or self.reports.doubt(layout)
        if doubt is not None or not self.speculates or not self.pools or (layout is not None and layout.lookahead):
            return doubt
        # vLLM computes the last block of a hit again then.
        return "it speculates, and its hashes do not look ahead: with EAGLE or MTP a hit is a block shorter"

    @property
    def orphan_blocks(self) -> int:
        return self._orphans.blocks

    def resident_blocks(self) -> int:
        return self.pools.blocks

    def held(self) -> tuple[Held, ...]:
        return self.pools.held()

    def keys(self, medium: str = "GPU") -> set[int]:
        return {key for held in self.held() if held.medium == medium for key in held.keys}

    def matched(self, keys: Sequence[int], medium: str = "GPU") -> int:
        """Count the leading blocks of a prompt that the medium holds, in units of its layout if it has groups."""
        return self.pools.matched(keys, medium, self.groups.layout)

    def digest(self) -> Digest:
        return self.pools.digest()

    # ---- all at once

    def reset(self) -> Cleared:
        cleared = self._forget()
        self.doubtful.clear()
        return cleared

    def lose(self) -> Cleared:
        """Forget blocks that may be gone since events were lost; only what is stored from now on is claimed."""
        provable = not self.native and self.groups.layout is None  # a hit does not prove every block of other groups
        self.doubtful.lose(self.pools, MAX_BLOCKS, keep=provable)
        return self._forget()

    def _forget(self) -> Cleared:
        cleared = Cleared(self.held())
        self.pools.clear()
        self._orphans.clear()
        self.naming.verified = None
        self.capacity.forgive()
        self.lost = self.outgrown = None
        self.reports.copies = 0
        self.complete = False
        return cleared

    def restarted(self) -> None:
        """Forget what the groups are, and whether there are reports: another process may follow."""
        self.groups.forget()
        self.reports.forget()
        self.naming.hash_chain = HashChain()  # it may be another algorithm
        self.capacity.cacheable_blocks = None  # its pool may have another size

    # ---- what hits have found

    @property
    def learns_from_hits(self) -> bool:
        """True if blocks of its only group may be resident that no event has told of."""
        return not self.native and self.groups.layout is None and self.doubtful.is_of_one_group(self.pools)

    def found(self, keys: Sequence[int], *, proved: bool = False) -> list[int]:
        """Take blocks as resident that the replica has reused since the loss; return the keys new here.

        `proved`: no unknown block and none of these was removed since, so they are resident whatever their hashes are.
        """
        pool = self.pools.of("GPU", 0)
        blocks = [(one, key) for one, key in self.doubtful.take(keys) if one not in pool]
        pool.named.update(blocks)
        new = pool.hold(key for _, key in blocks)
        if not proved or not self.learns_from_hits:
            return new
        fresh = [key for key in dict.fromkeys(keys) if key not in pool.held][: max(0, self.capacity.room(pool))]
        fresh = fresh if self._intern is None else self._intern(fresh)
        pool.hold_unnamed(fresh)
        return new + fresh

    def _forget_unnamed(self, pool: Pool, changes: list[Change]) -> None:
        if pool.unnamed:
            changes.append(Removed(pool.medium, pool.forget_unnamed(), pool.group))

    # ---- events

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
                if self.doubtful.after_loss:
                    self._look_for_turnover(changes)
            elif isinstance(event, BlockRemoved):
                hashes = event.block_hashes
                if event.locality == REMOTE:
                    self.stats.remote_blocks += len(hashes)
                    continue
                self.stats.removed_blocks += len(hashes)
                pool = self.pools.get(pool_name(event.medium, event.group_idx))
                if pool is None:
                    self.stats.removed_unknown += len(hashes)
                    self.doubtful.gone(hashes)
                else:
                    self._remove_from(pool, hashes, changes)
            elif isinstance(event, AllBlocksCleared):
                self.stats.cleared += 1
                changes.append(self.reset())
            elif isinstance(event, RejectedEvent):
                self.stats.rejected_events += 1
                self.lost = f"an event could not be read: {event.reason}"
            elif isinstance(event, UnknownEvent):
                self.stats.unknown_events += 1
        self.reports.latest = None  # a block of another batch may have been computed in between
        return changes

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

    def _look_for_turnover(self, changes: list[Change]) -> None:
        """All of the cache is known once the known blocks fill the replica's pool."""
        for one in self.pools.values():
            if one.unnamed and (not self.learns_from_hits or self.capacity.room(one) < 0):
                self._forget_unnamed(one, changes)
        pool = self.doubtful.turned_over(self.pools, self.capacity.cacheable_blocks)
        if pool is not None:
            self.reports.copies -= pool.settle()
            self.complete = True
            self.doubtful.clear()

    # ---- stores

    def _store(self, event: BlockStored, changes: list[Change]) -> None:
        hashes = event.block_hashes
        if event.locality == REMOTE:
            self.stats.remote_blocks += len(hashes)
            return
        if not hashes:
            if self.groups.sparse and event.token_ids and not self.native:  # later blocks follow these
                self._described(event)
            return
        pool = self.capacity.pool_with_room(event)
        if pool is None:
            self.stats.refused_blocks += len(hashes)
            return
        self.stats.stored_blocks += len(hashes)
        if (hashes[0] in pool.named or self.reports.latest is not None) and self._is_report(event, pool, changes):
            return
        if self.native:
            named = self.naming.own_keys(event)
            if named is None:
                self.lost = f"the replica's hashes are not block keys of model {self.naming.model!r} as it claims"
        else:
            named = self._resolve(event, pool, changes)
        if named is not None:
            parent_key, keys = named
            new = self._name(pool, hashes, keys)
            changes.append(Stored(pool.medium, new, keys, parent_key, event, pool.group))
            if self._orphans:
                changes += self._orphans.wake(zip(hashes, keys, strict=True), self._assign)

    def _resolve(self, event: BlockStored, pool: Pool, changes: list[Change]) -> tuple[int, list[int]] | None:
        """The parent's key and the blocks' own; if there are none (yet), the blocks are announced without a key."""
        hashes, size, layout = event.block_hashes, event.block_size, self.groups.layout
        if not event.token_ids:
            self._store_by_hash(event, pool, changes)
            return None
        if pool.medium != "GPU" and (found := self.naming.below(event)) is not None:
            return found
        if self.groups.sparse:
            self._store_described(event, pool, changes)
            return None
        if layout is not None and len(event.token_ids) != size * len(hashes):
            self._store_sparse(event, pool, changes)
            return None
        if len(event.token_ids) != size * len(hashes):
            self.stats.unpaired_blocks += len(hashes)
        elif (parent_key := self.naming.parent_key(event, pool)) is None:
            assert event.parent_block_hash is not None, "a block without a parent follows the root"
            self.lost = self._orphans.wait(event.parent_block_hash, event) or self.lost
        elif (keys := self.naming.chain(event, parent_key)) is not None:
            return parent_key, keys
        elif layout is not None and size != layout.unit:
            self._store_sparse(event, pool, changes)
            return None
        else:
            self.stats.unpaired_blocks += len(hashes)
        self._announce(pool, hashes)
        return None

    def _store_by_hash(self, event: BlockStored, pool: Pool, changes: list[Change]) -> None:
        """Blocks named by hash alone: their keys are known from another tier or group, now or later."""
        self._announce(pool, event.block_hashes)
        keys, new = [], []
        for block_hash in event.block_hashes:
            key = self.naming.key(block_hash)
            if key is None:
                self.lost = self._orphans.wait(block_hash, event) or self.lost
            else:
                keys.append(key)
                new += self._assign(pool, block_hash, key)
        if keys:
            changes.append(Stored(pool.medium, new, keys, 0, event, pool.group))

    def _store_sparse(self, event: BlockStored, pool: Pool, changes: list[Change]) -> None:
        """Blocks that cannot be paired with the event's tokens: a group with all of them names the same hashes."""
        self._store_by_hash(replace(event, token_ids=[]), pool, changes)

    def _store_described(self, event: BlockStored, pool: Pool, changes: list[Change]) -> None:
        """Blocks among those that the event describes; no group names all of them."""
        hashes, parent = event.block_hashes, event.parent_block_hash
        names = self._described(event)
        if names is None:
            self._announce(pool, hashes)
        elif ends_in_a_hit(event, pool, self.groups.layout):
            self.reports.seen = True
            self.stats.reported_blocks += len(hashes)
        else:
            new = self._name(pool, hashes, [names[low64(block_hash)] for block_hash in hashes])
            before = self.naming.root(event) if parent is None else self.naming.key(parent)
            changes.append(Stored(pool.medium, new, list(names.values()), before or 0, event, pool.group))

    def _described(self, event: BlockStored) -> dict[int, int] | None:
        names = self.naming.described(event)
        if names is None:
            self.lost = (
                f"group {event.group_idx or 0} keeps some of the blocks that its events describe and does not say "
                "which, and their hashes are not of vLLM's sha256 without PYTHONHASHSEED"
            )
        return names

    def _name(self, pool: Pool, hashes: list[Hash], keys: list[int]) -> list[int]:
        """Add a copy of each hash with a known key; return keys new to the pool."""
        if self._intern is not None:
            keys = self._intern(keys)
        if pool.add_new(hashes, keys):
            return keys
        new: list[int] = []
        for block_hash, key in zip(hashes, keys, strict=True):
            self._announce(pool, [block_hash])
            new += self._assign(pool, block_hash, key)
        return new

    def _announce(self, pool: Pool, hashes: list[Hash]) -> None:
        self.stats.duplicate_blocks += pool.announce(hashes)

    def _assign(self, pool: Pool, block_hash: Hash, key: int) -> list[int]:
        new = pool.assign(block_hash, key)
        if new is None:
            self.lost = f"block {block_hash!r} was announced twice with different tokens"
        return new or []

    # ---- reports of resident blocks

    def _is_report(self, event: BlockStored, pool: Pool, changes: list[Change]) -> bool:
        """Return True if the event only reports blocks; copies that may be reports are counted apart."""
        reports = self.reports
        if self.native or self.groups.sparse or pool.medium != "GPU":
            return False
        if reports.proves(event, pool):
            self._take_back_reports(changes)
        if not reports.like(event, pool):
            return False
        if not reports.seen:
            reports.count(event, pool)
            gpu_blocks = self.capacity.gpu_blocks
            if gpu_blocks is None or self.pools.blocks + reports.copies <= gpu_blocks:  # there is room for copies
                return False
            self._take_back_reports(changes)
        self.stats.reported_blocks += len(event.block_hashes)
        return True

    def _take_back_reports(self, changes: list[Change]) -> None:
        for pool, spent in self.reports.take_back(self.pools):
            self._remove_from(pool, spent, changes)

    # ---- removals

    def _remove_from(self, pool: Pool, hashes: Iterable[Hash], changes: list[Change]) -> None:
        keys, unknown, keyless, doubted = pool.remove(hashes)
        self._orphans.gone += keyless
        self.reports.copies -= doubted
        if unknown:
            self.stats.removed_unknown += len(unknown)
            if self.doubtful.gone(unknown) and pool.unnamed:
                keys += pool.forget_unnamed()
            if self.reports.seen and not self.doubtful.after_loss:
                self.lost = "a block was removed twice whose second store was taken for a report of the first"
        if keys:
            changes.append(Removed(pool.medium, keys, pool.group))

    def check(self) -> None:
        for pool in self.pools.values():
            pool.check()
        self._orphans.check()
