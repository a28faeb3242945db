"""The keys of a replica's blocks: known by their hashes, or made of a parent's key and the tokens."""

from collections.abc import Iterable

from msgspec.structs import replace

from events.cache.extras import chain_keys, chain_root, part_of
from events.cache.groups import Groups
from events.cache.hash_chain import HashChain
from events.cache.pool import Pool, pool_name
from events.cache.pools import Pools
from events.messages import BlockStored, Hash, decode_tokens

MAIN = "GPU", 0


class Doubtful:
    """The keys of blocks that were resident before a loss of events: any of them may be gone. Nothing before a loss.

    They are no claim. They give stored blocks the key of their parent, and a block that the replica is seen to use
    again its hash, without which its removal could not be followed.
    """

    def __init__(self) -> None:
        self.after_loss = False  # there may be blocks that nobody told of
        self.unknown_removals = 0  # removals of blocks whose key was not known
        self.keys: dict[Hash, int] = {}
        self._hashes: dict[int, Hash] = {}
        self._pools_before: set[tuple[str, int]] = set()  # the loss

    def __bool__(self) -> bool:
        return bool(self.keys)

    def lose(self, pools: Pools, limit: int, *, keep: bool) -> None:
        """Events were lost: doubt these pools' blocks, or, unless they are to be kept, only note their pools."""
        self.after_loss = True
        self._pools_before |= pools.keys()
        if not keep or (pool := pools.get(MAIN)) is None:
            return
        if len(self.keys) + len(pool) > limit:  # drop those of earlier losses
            self._drop_all()
        for block_hash, key in pool.named.items():
            if key is not None and key not in pool.holders:  # one of several hashes: which, nobody could tell
                self.keys[block_hash] = key
                self._hashes[key] = block_hash

    def gone(self, hashes: Iterable[Hash]) -> int:
        """Note removals of blocks that are not known to be resident; return how many have no known key."""
        unknown = sum(not self._forget(block_hash) for block_hash in hashes)
        self.unknown_removals += unknown
        return unknown

    def take(self, keys: Iterable[int]) -> list[tuple[Hash, int]]:
        taken = [(self._hashes[key], key) for key in keys if key in self._hashes]
        for block_hash, _ in taken:
            self._forget(block_hash)
        return taken

    def _forget(self, block_hash: Hash) -> bool:
        """Forget a block; return False if it is not known."""
        key = self.keys.pop(block_hash, None)
        if key is not None:
            self._hashes.pop(key, None)
        return key is not None

    def is_of_one_group(self, pools: Pools) -> bool:
        """Return whether there may be blocks that nobody told of, and only in the first pool of GPU memory."""
        return self.after_loss and self._pools_before | pools.keys() <= {MAIN}

    def turned_over(self, pools: Pools, cacheable_blocks: int | None) -> Pool | None:
        """The replica's pool if the known blocks fill it: then there are no others, and no second copies.

        This needs a single pool, in which every block has one hash.
        """
        if cacheable_blocks is None or self._pools_before | pools.keys() != {MAIN}:
            return None
        pool = pools.get(MAIN)
        return pool if pool is not None and len(pool) == cacheable_blocks and not pool.spent else None

    def clear(self) -> None:
        self.after_loss = False
        self._pools_before = set()
        self._drop_all()

    def _drop_all(self) -> None:
        self.keys.clear()
        self._hashes.clear()


class Naming:
    def __init__(self, model: str, pools: Pools, groups: Groups, doubtful: Doubtful) -> None:
        self.verified: bool | None = None  # the hashes of a native replica; None: not looked at yet
        self.model = model
        self.named_by = ""  # the model that a snapshot names for its keys, if it does
        self._pools = pools
        self._groups = groups
        self._doubtful = doubtful
        self.hash_chain = HashChain()

    def key(self, block_hash: Hash) -> int | None:
        """The key of a hash that is resident, or was before a loss."""
        key = self._pools.key(block_hash)
        return self._doubtful.keys.get(block_hash) if key is None else key

    def root(self, event: BlockStored) -> int:
        layout = self._groups.layout
        return chain_root(event, self.model, event.block_size if layout is None else layout.unit)

    def chain(self, event: BlockStored, parent_key: int) -> list[int] | None:
        layout = self._groups.layout
        return chain_keys(event, parent_key, 0 if layout is None else layout.unit)

    def parent_key(self, event: BlockStored, pool: Pool) -> int | None:
        """The key of the event's parent, or None while it is not known."""
        parent = event.parent_block_hash
        if parent is None:
            return self.root(event)
        key = pool.named.get(parent)
        return self.key(parent) if key is None else key

    def below(self, event: BlockStored) -> tuple[int, list[int]] | None:
        """The parent's key and the blocks' own in a lower medium, whose events leave salts and images out.

        A hash that is known names its block. Only a block that is not known by its hash is named by the one before and
        by its tokens.
        """
        size, hashes = event.block_size, event.block_hashes
        if len(event.token_ids) != size * len(hashes):
            return None
        parent = event.parent_block_hash
        above = self.root(event) if parent is None else self.key(parent)
        named: dict[Hash, int] = {}
        keys: list[int] = []
        last = above
        for index, block_hash in enumerate(hashes):
            key = self.key(block_hash) or named.get(block_hash)
            if key is None:
                own, end = part_of(event, index, index + 1), (index + 1) * size
                one = replace(event, token_ids=event.token_ids[end - size : end], **own)
                if last is None or not (made := self.chain(one, last)):
                    return None
                key = named[block_hash] = made[0]
            keys.append(key)
            last = key
        return above or 0, keys

    def described(self, event: BlockStored) -> dict[int, int] | None:
        """The keys of all blocks that the event describes, by the last 64 bits of their hashes.

        None if it does not say which of them it names.
        """
        layout = self._groups.layout
        if layout is None or event.block_size != layout.unit:
            return None
        pool = self._pools.get(pool_name(event.medium, event.group_idx))
        return self.hash_chain.names(event, self.root(event), () if pool is None else pool.named)

    def own_keys(self, event: BlockStored) -> tuple[int, list[int]] | None:
        """The parent's key and the blocks' own where a native replica's hashes are keys; None if they are not.

        They are verified on the first chain from a root; if they are wrong, no block gets a key.
        """
        hashes, parent = event.block_hashes, event.parent_block_hash
        if self.named_by not in ("", self.model):
            return None
        if self.verified is None and parent is None:
            try:
                full = decode_tokens(event)
                self.verified = chain_keys(full, chain_root(full, self.model)) == hashes
            except ValueError:
                self.verified = False
        try:
            if self.verified is False or min(hashes) < 0:  # type: ignore[operator]
                return None
        except TypeError:  # bytes are among them
            return None
        return parent if isinstance(parent, int) else chain_root(event, self.model), hashes  # type: ignore[return-value]
