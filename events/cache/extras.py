"""Block keys from an event's fields besides its hashes: tokens of any engine, adapter, salt, images, prompt embeds."""

from collections.abc import Iterable
from typing import Any

from events.blocks import TOKEN_BYTES, ExtraKey, Extras, extend_keys, pack_tokens, root_key
from events.messages import BlockStored, Token

MAX_LOOKAHEAD = 64  # tokens


def plain_tokens(token_ids: Iterable[Token]) -> list[int]:
    """Token ids of engines that send pairs (token, next token) or strings of digits."""
    return [int(token[0] if isinstance(token, tuple) else token) for token in token_ids]


def chain_salt(event: BlockStored) -> str | None:
    """The cache salt of a chain that starts with this event."""
    if event.cache_salt is not None:
        return event.cache_salt
    if event.metadata is not None and isinstance(event.metadata.get("cache_salt"), str):
        return str(event.metadata["cache_salt"])
    first = event.extra_keys[0] if event.extra_keys else None
    strings = [part for part in first or () if isinstance(part, str)]
    if event.lora_name is not None and strings and strings[0] == event.lora_name:
        del strings[0]
    return strings[0] if strings else None


def chain_root(event: BlockStored, model: str, block_size: int | None = None) -> int:
    """The root key of a chain that starts with this event; its keys stand for blocks of this size, or of its own."""
    lora = event.lora_name
    if lora is None and event.lora_id is not None:
        lora = f"#{event.lora_id}"  # vLLM before 0.14 names adapters by number only
    return root_key(model, lora, chain_salt(event), block_size or event.block_size)


def chain_keys(event: BlockStored, parent_key: int, unit: int = 0) -> list[int] | None:
    """The keys of the event's blocks; in a chain of smaller blocks, each is that of the small block at its end.

    None if its tokens, or those that its hashes look ahead to, are not all there.
    """
    hashes, size, ahead = event.block_hashes, event.block_size, event.lookahead_token_ids
    unit = unit or size
    pairs = has_pairs(event)
    try:
        packed = b"" if pairs else pack_tokens(event.token_ids)  # type: ignore[arg-type]
    except ValueError:
        packed = b""
    packed = packed or packed_tokens(event) or b""
    if size < 1 or size % unit or len(packed) != TOKEN_BYTES * size * len(hashes):
        return None
    extras = block_extras(event) if event.mm_keys or (event.extra_keys and any(event.extra_keys)) else None
    if extras and unit != size:
        return None  # they do not say which of the small blocks they belong to
    after: list[int] = []
    if ahead:
        if len(ahead) != len(hashes) or not 1 <= len(ahead[0]) == len(ahead[-1]) <= MAX_LOOKAHEAD:
            return None
        after = ahead[-1]
    elif pairs:
        last = event.token_ids[-1]
        if not isinstance(last, tuple):
            return None
        after = [last[1]]
    if after:
        try:
            packed += pack_tokens(after)
        except ValueError:
            return None
    keys = extend_keys(parent_key, packed, unit, extras, len(after))
    return keys if unit == size else keys[size // unit - 1 :: size // unit]


def has_pairs(event: BlockStored) -> bool:
    """True if it names tokens as pairs (token, next token), as SGLang does with EAGLE."""
    tokens = event.token_ids
    return isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], tuple)  # undecoded where hashes are keys


def lookahead_of(event: BlockStored) -> int:
    """Tokens after each of its blocks that the engine's hashes cover."""
    ahead = event.lookahead_token_ids
    return len(ahead[0]) if ahead else int(has_pairs(event))


def part_of(event: BlockStored, start: int, end: int) -> dict[str, Any]:
    """The fields that have an entry for each block, of these blocks alone."""
    names = ("block_hashes", "extra_keys", "mm_keys", "lookahead_token_ids")
    return {name: of[start:end] for name in names if (of := getattr(event, name))}


def packed_tokens(event: BlockStored) -> bytes | None:
    """The event's token ids of any form, packed; None if they are none."""
    try:
        return pack_tokens(plain_tokens(event.token_ids))
    except ValueError:
        return None


def block_extras(event: BlockStored) -> Extras | None:
    """Multimodal ids with their offsets and prompt-embed digests by block; LoRA name and salt are in the root."""
    found: dict[int, list[ExtraKey]] = {}
    for index, parts in enumerate(event.extra_keys or ()):
        own: list[ExtraKey] = []
        for part in parts or ():
            if isinstance(part, bytes):
                own.append(part)
            elif isinstance(part, list | tuple) and len(part) == 2 and isinstance(part[1], int):
                own.append((_image_id(part[0]), part[1]))
        if own:
            found[index] = own
    for index, images in enumerate(event.mm_keys or ()):
        for image in images if isinstance(images, list) else ():
            if isinstance(image, dict) and isinstance(offset := image.get("start_offset"), int):
                found.setdefault(index, []).append((_image_id(image.get("hash")), offset))
    return found or None


def _image_id(value: object) -> str:
    """The engine's name of an image; of a shape no engine sends only the type, for it may be nested without end."""
    return str(value) if isinstance(value, str | int | bytes) else type(value).__name__
