"""Block keys: the router's own name for a prefix, whatever hash the engine uses.

    root  = hash(model, LoRA name, cache salt, block size)
    key_i = hash(tokens of block i as little-endian uint32 [+ extra keys of block i], seed = key_{i-1})

Only full blocks have a key. The same rule is used by the router for prompts, by the resolver for foreign events and by
our own engine for its block hashes, so changing anything here makes replicas and routers of different versions
disagree.
"""

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4

# Token ids as little-endian uint32.
PackedTokens: TypeAlias = bytes | bytearray | memoryview
# A block's KV depends on these, too: a multimodal id and its offset from the block's start, or a prompt-embed digest.
ExtraKey: TypeAlias = tuple[str, int] | bytes
# Extra keys by the index of the block they stand in; blocks without any are absent.
Extras: TypeAlias = Mapping[int, Sequence[ExtraKey]]

_encode_msgpack = msgspec.msgpack.Encoder().encode


def root_key(model: str, lora_name: str | None = None, cache_salt: str | None = None, block_size: int = 16) -> int:
    """The key that stands before block 0: prompts with different roots share nothing."""
    return xxh3_64_intdigest(_encode_msgpack((model, lora_name, cache_salt, block_size)))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    if isinstance(token_ids, array) and token_ids.typecode == "I" and sys.byteorder == "little":
        return token_ids.tobytes()
    try:
        return _token_struct(len(token_ids)).pack(*token_ids)
    except struct.error as error:
        for position, token in enumerate(token_ids):
            if not isinstance(token, int) or not 0 <= token < 2**32:
                wrong = f"token {position} is {token!r}; a token id is an integer from 0 to 2**32 - 1"
                raise ValueError(wrong) from error
        raise ValueError(f"{len(token_ids)} token ids cannot be packed") from error


def block_keys(
    tokens: Sequence[int] | PackedTokens, block_size: int, root: int, extras: Extras | None = None
) -> list[int]:
    """The keys of a whole prompt's full blocks, from a list of token ids or from them packed."""
    packed = tokens if isinstance(tokens, bytes | bytearray | memoryview) else pack_tokens(tokens)
    return extend_keys(root, packed, block_size, extras)


def extend_keys(
    parent_key: int, packed: PackedTokens, block_size: int, extras: Extras | None = None, lookahead: int = 0
) -> list[int]:
    """The keys of the full blocks in `packed`, the first of which follows the block named `parent_key`.

    An engine with EAGLE or MTP keeps KV that depends on the next token, too: with a `lookahead` a key also stands for
    so many tokens after its block, and blocks that lack them have none. The hashed text is longer than a plain block,
    and the root tells block sizes apart, so these keys are no others' keys; nor are those of blocks with extra keys.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    stride, after = block_size * TOKEN_BYTES, lookahead * TOKEN_BYTES
    blocks = max(0, len(packed) - after) // stride
    key = parent_key
    if not extras and not lookahead:
        if len(packed) != blocks * stride:
            packed = memoryview(packed)[: blocks * stride]
        return [key := xxh3_64_intdigest(tokens, key) for (tokens,) in _block_struct(stride).iter_unpack(packed)]
    text, keys = memoryview(packed), []
    for index in range(blocks):
        tokens = text[index * stride : (index + 1) * stride + after]
        own = extras.get(index) if extras else None
        key = xxh3_64_intdigest(bytes(tokens) + _encode_msgpack(own) if own else tokens, key)
        keys.append(key)
    return keys


@lru_cache(maxsize=256)
def _token_struct(tokens: int) -> struct.Struct:
    return struct.Struct(f"<{tokens}I")


@lru_cache(maxsize=64)
def _block_struct(block_bytes: int) -> struct.Struct:
    return struct.Struct(f"{block_bytes}s")
