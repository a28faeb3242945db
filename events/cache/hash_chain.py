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
from events.cache.extras import block_extras, chain_salt, packed_tokens, plain_tokens
from events.cache.pool import low64
from events.messages import BlockStored, Hash

SEED = "vllm-none-hash"
MAX_BLOCKS = 4096  # the limit for one event
MAX_KNOWN = 65_536  # hashes, beside those of resident blocks

Part = bytes | str | int | tuple[Any, ...] | None


def cbor(value: Part) -> bytes:
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
    """The blocks that one replica's events describe, by the last 64 bits of their hashes, as engines may send them."""

    def __init__(self) -> None:
        # One for each algorithm that it may be; the first announced hash leaves one.
        self._chains: dict[Callable[[Part], bytes], dict[int, Link]] = {encode: {} for encode in ENCODINGS}

    def key(self, block_hash: Hash) -> int | None:
        """The key of a block that an event has described, as long as it is remembered."""
        found = (known.get(low64(block_hash)) for known in self._chains.values())
        return next((link.key for link in found if link is not None), None)

    def names(self, event: BlockStored, root: int, resident: Collection[Hash]) -> dict[int, int] | None:
        """The keys of the blocks that the event describes, in order, by the last 64 bits of their hashes.

        None if the announced hashes are not among them.
        """
        size, ahead = event.block_size, event.lookahead_token_ids
        if ahead or len(event.token_ids) > MAX_BLOCKS * size or len(event.token_ids) % size:
            return None
        extended = {encode: _extended(known, event, root, encode) for encode, known in self._chains.items()}
        hashes = set(map(low64, event.block_hashes))
        fitting = {encode: links for encode, links in extended.items() if links is not None and links.keys() >= hashes}
        if not fitting:
            return None
        self._chains = {encode: self._chains[encode] | links for encode, links in fitting.items()}
        for known in self._chains.values():
            if len(known) > MAX_KNOWN + 2 * len(resident):
                kept = set(map(low64, resident))
                for block_hash in list(known)[: len(known) // 2]:
                    if block_hash not in kept:
                        del known[block_hash]
        return {block_hash: link.key for block_hash, link in next(iter(fitting.values())).items()}


def _extended(
    known: dict[int, Link], event: BlockStored, root: int, encode: Callable[[Part], bytes]
) -> dict[int, Link] | None:
    """The chain of the event's blocks, if it is known what they follow, and if nothing but tokens is hashed."""
    parent, salt = event.parent_block_hash, chain_salt(event)
    link = Link(root, sha256(encode(SEED)).digest()) if parent is None else known.get(low64(parent))
    packed = packed_tokens(event)
    if link is None or packed is None or event.lora_name is not None or block_extras(event):
        return None
    tokens, size, digest = plain_tokens(event.token_ids), event.block_size, link.digest
    extra: Part = (("cache_salt", salt),) if parent is None and salt is not None else None
    links: dict[int, Link] = {}
    for block, key in enumerate(extend_keys(link.key, packed, size)):
        digest = sha256(encode((digest, tuple(tokens[block * size : (block + 1) * size]), extra))).digest()
        links[low64(digest)] = Link(key, digest)
        extra = None
    return links
