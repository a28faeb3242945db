"""The tokens of one request, the names of its full blocks, and how far the pool has named them."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from events.blocks import ExtraKey, Extras, extend_keys, root_key
from events.messages import BlockStored

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Chain:
    """Prompt and output tokens, growing; `keys` has one entry for each full block of them.

    `exact` holds, for the blocks that have any, what decides their KV besides tokens: the pool compares it byte by
    byte. LoRA adapter and salt stand in block 0 only, because whoever shares a later block shares block 0. An adapter's
    name is a part of the keys, too; the digest of its files is not, as nobody outside can know it.
    """

    __slots__ = (
        "block_size",
        "cache_salt",
        "exact",
        "extras",
        "identity",
        "keys",
        "lora_digest",
        "lora_name",
        "named",
        "root",
        "tokens",
    )

    def __init__(
        self,
        tokens: Iterable[int],
        block_size: int,
        model: str,
        *,
        lora_name: str | None = None,
        lora_digest: str = "",
        cache_salt: str | None = None,
        extras: Extras | None = None,
    ) -> None:
        self.tokens = array("I", tokens)
        self.block_size = block_size
        self.lora_name = lora_name
        self.lora_digest = lora_digest
        self.cache_salt = cache_salt
        self.extras: Extras = extras or {}
        self.root = root_key(model, lora_name, cache_salt, block_size)
        self.keys = array("Q", extend_keys(self.root, memoryview(self.tokens).cast("B"), block_size, extras))
        self.exact = {index: _encode(tuple(own)) for index, own in self.extras.items() if own}
        if lora_name is not None or cache_salt is not None:
            own = lora_name, cache_salt, tuple(self.extras.get(0, ()))
            self.exact[0] = _encode((*own, lora_digest) if lora_digest else own)
        self.named = 0  # how many blocks from the start are named in the pool
        self.identity: int | None = 0  # the last block's (0: the root); None: no further block may be named

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) % self.block_size == 0:
            index = len(self.keys)
            own = {0: self.extras[index]} if index in self.extras else None
            block = self.tokens[-self.block_size :].tobytes()
            self.keys.extend(extend_keys(self.keys[-1] if self.keys else self.root, block, self.block_size, own))

    def tokens_of(self, index: int) -> bytes:
        """The tokens of block `index`, packed."""
        return self.tokens[index * self.block_size : (index + 1) * self.block_size].tobytes()

    def parent_key(self, index: int) -> int | None:
        """The key before block `index`; None at the start."""
        return self.keys[index - 1] if index else None

    def stored_event(self, start: int, stop: int, medium: str) -> BlockStored:
        """The event that says that these blocks are in a medium now."""
        return BlockStored(
            block_hashes=self.keys[start:stop].tolist(),  # type: ignore[arg-type]
            parent_block_hash=self.parent_key(start),
            token_ids=self.tokens[start * self.block_size : stop * self.block_size],
            block_size=self.block_size,
            lora_id=None,
            medium=medium,
            lora_name=self.lora_name,
            extra_keys=self.event_extras(start, stop),
        )

    def event_extras(self, start: int, stop: int) -> list[list[object] | None] | None:
        """The `extra_keys` of a BlockStored for these blocks, as vLLM sends them."""
        if not self.exact and self.lora_name is None:
            return None
        extras: list[list[object] | None] = []
        for index in range(start, stop):
            own: Sequence[ExtraKey] = self.extras.get(index, ())
            parts: list[object] = [] if self.lora_name is None else [self.lora_name]
            parts += [list(part) for part in own if isinstance(part, tuple)]
            if index == 0 and self.cache_salt is not None:
                parts.append(self.cache_salt)
            parts += [part for part in own if isinstance(part, bytes)]
            extras.append(parts or None)
        return extras


class FirstKeys(NamedTuple):
    """The adapter, salt and extra keys of a first block."""

    lora_name: str | None = None
    cache_salt: str | None = None
    extras: Sequence[ExtraKey] = ()
    lora_digest: str = ""


def keys_in(exact: bytes | None, index: int) -> FirstKeys:
    """Read the entry of a chain's block `index` in `Chain.exact`."""
    own = () if exact is None else _decode(exact)
    # Extra keys are pairs and bytes, so a name or None begins with an adapter and a salt.
    return FirstKeys(*own) if not index and own and isinstance(own[0], str | None) else FirstKeys(extras=own)
