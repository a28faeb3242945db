"""vLLM's own block hashes, computed from tokens: for groups whose events do not say which blocks they name.

A group that keeps only the end of a prefix is stored sparsely: the event has the tokens of all new blocks, but hashes
of some. Where no other group names all of them, the hashes tell, as they are a chain over the tokens: a computed
hash that equals an announced one proves its place. This needs the algorithm's first hash, which is known for vLLM's
cryptographic algorithms unless the operator sets PYTHONHASHSEED; adapters are hashed by their path, which is not known.
"""

import pickle
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import Any, NamedTuple

from events.blocks import extend_keys
from events.extras import block_extras, chain_salt, packed_tokens, plain_tokens
from events.messages import BlockStored, Hash
from events.pool import low64

SEED = "vllm-none-hash"
MOST_BLOCKS = 4096  # of one event
MOST_KNOWN = 65_536  # hashes, beside those of resident blocks

Part = bytes | str | int | tuple[Any, ...] | None


def cbor(value: Part) -> bytes:
    """Canonical CBOR of what is hashed."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        return _head(3, len(text := value.encode())) + text
    return _head(4, len(value)) + b"".join(map(cbor, value))


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    size = next(size for size in range(4) if value < 1 << (8 << size))
    return bytes([major << 5 | 24 + size]) + value.to_bytes(1 << size)


def pickled(value: Part) -> bytes:
    return pickle.dumps(value, protocol=5)


ENCODINGS: tuple[Callable[[Part], bytes], ...] = (pickled, cbor)


class Link(NamedTuple):
    """A block of the chain: our key of it and the engine's digest."""

    key: int
    digest: bytes


class HashChain:
    """One replica's hashes, by the blocks that its events describe."""

    def __init__(self) -> None:
        self._encode: Callable[[Part], bytes] | None = None  # None: not known yet
        self._links: dict[Hash, Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def names(self, event: BlockStored, root: int, resident: Collection[Hash]) -> dict[Hash, int] | None:
        """The keys of all blocks that the event describes, by hash, in order; None if its hashes are not among them."""
        if (
            event.lookahead_token_ids
            or len(event.token_ids) > MOST_BLOCKS * event.block_size
            or len(event.token_ids) % event.block_size
        ):
            return None
        for encode in ENCODINGS if self._encode is None else (self._encode,):
            links = self._extended(event, root, encode)
            if links is None or not links.keys() >= set(event.block_hashes):
                continue
            if event.block_hashes:
                self._encode = encode
            if self._encode is not None:
                self._remember(links, resident)
            return {block_hash: link.key for block_hash, link in links.items()}
        return None

    def _extended(self, event: BlockStored, root: int, encode: Callable[[Part], bytes]) -> dict[Hash, Link] | None:
        parent, salt = event.parent_block_hash, chain_salt(event)
        link = Link(root, sha256(encode(SEED)).digest()) if parent is None else self._links.get(parent)
        packed = packed_tokens(event)
        if link is None or packed is None or event.lora_name is not None or block_extras(event):
            return None
        keys = extend_keys(link.key, packed, event.block_size)
        tokens, size, digest = plain_tokens(event.token_ids), event.block_size, link.digest
        extra: Part = (("cache_salt", salt),) if parent is None and salt is not None else None
        as_bytes = any(isinstance(block_hash, bytes) for block_hash in event.block_hashes) or isinstance(parent, bytes)
        links: dict[Hash, Link] = {}
        for block, key in enumerate(keys):
            digest = sha256(encode((digest, tuple(tokens[block * size : (block + 1) * size]), extra))).digest()
            links[digest if as_bytes else low64(digest)] = Link(key, digest)
            extra = None
        return links

    def _remember(self, links: dict[Hash, Link], resident: Collection[Hash]) -> None:
        self._links |= links
        if len(self._links) > MOST_KNOWN + 2 * len(resident):
            oldest = list(self._links)[: len(self._links) // 2]
            for block_hash in oldest:
                if block_hash not in resident:
                    del self._links[block_hash]
