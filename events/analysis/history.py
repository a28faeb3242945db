"""The stream so far, by the engine's own hashes: the memory of the conformance checks."""

from collections import Counter

from events.cache.extras import chain_keys, chain_root
from events.cache.groups import FULL, RULES
from events.messages import REMOTE, AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash


class Group:
    """One KV-cache group of the engine. Everything ever stored is remembered, for as long as the check runs."""

    def __init__(self) -> None:
        self.block_size: int | None = None
        self.key_of: dict[Hash, int | None] = {}  # None: its tokens could not be paired
        self.hash_of: dict[int, Hash] = {}
        self.copies: Counter[tuple[str, Hash]] = Counter()

    def resident(self, block_hash: Hash, media: set[str]) -> bool:
        return any(self.copies[medium, block_hash] > 0 for medium in media)


class History:
    """The content of one incarnation, batches in order."""

    def __init__(self) -> None:
        self.complete = False  # it begins with an empty cache and misses nothing
        self.ts: float | None = None
        self.rank: int | None = None
        self.batches = 0
        self.hash_kind: str | None = None
        self.media: set[str] = set()
        self.groups: dict[int, Group] = {}

    def group(self, event: BlockStored | BlockRemoved) -> Group:
        return self.groups.setdefault(event.group_idx or 0, Group())

    def chain(self, event: BlockStored) -> list[int] | None:
        """The event's blocks named by content, or None if its tokens cannot be paired or the parent's are unknown."""
        # The names of adapters may be given again, so their numbers stand for a model.
        parent: int | None = chain_root(event, "" if event.lora_id is None else str(event.lora_id))
        if event.parent_block_hash is not None:
            parent = self.group(event).key_of.get(event.parent_block_hash)
        return None if parent is None else chain_keys(event, parent)

    def add(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                if (copies := self.group(event).copies)[place_of(event), block_hash] > 0:
                    copies[place_of(event), block_hash] -= 1
        elif isinstance(event, AllBlocksCleared):
            self.complete = True
            for group in self.groups.values():
                group.copies.clear()

    def _store(self, event: BlockStored) -> None:
        group, medium = self.group(event), place_of(event)
        chain: list[int] | list[None] = self.chain(event) or [None] * len(event.block_hashes)
        self.media.add(medium)
        if group.block_size is None:
            group.block_size = event.block_size
        for block_hash, key in zip(event.block_hashes, chain, strict=True):
            self.hash_kind = self.hash_kind or kind_of(block_hash)
            group.copies[medium, block_hash] += 1
            if group.key_of.get(block_hash) is None:
                group.key_of[block_hash] = key
            if key is not None:
                group.hash_of.setdefault(key, block_hash)


def place_of(event: BlockStored | BlockRemoved) -> str:
    """The event's medium; a place that replicas share is one of its own."""
    medium = event.medium or "GPU"
    return f"{medium} ({REMOTE.lower()})" if event.locality == REMOTE else medium


def whole_prefix(event: BlockStored) -> bool:
    """Return True if the event's group keeps whole prefixes: other kinds do not tell how much can be reused."""
    kind = event.kv_cache_spec_kind
    return kind is None or RULES.get(kind) == FULL


def kind_of(block_hash: Hash) -> str:
    return f"{len(block_hash)} bytes" if isinstance(block_hash, bytes) else "integers"


def show(block_hash: Hash | None) -> str:
    """A hash as it stands in a message: the first 16 hex digits of bytes."""
    return f"0x{block_hash.hex()[:16]}" if isinstance(block_hash, bytes) else str(block_hash)
