"""The bytes that a token stands for, from the decoder in tokenizer.json.

Where the text of a sequence of tokens is the concatenation of their bytes, text can be streamed by decoding UTF-8
incrementally, and no token need be looked at twice.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Piece: TypeAlias = Callable[[str], bytes]

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def piece_rule(decoder: Mapping[str, Any] | None) -> Piece | None:
    """A function from a token to its bytes; None if the decoder depends on neighbouring tokens.

    Steps that apply only at the start of a text (strip a space) are left out: generated text continues a prompt.
    """
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return byte_level
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "stop": 0} if fused:  # before that it strips every token
                pass
            case _:
                return None
    return _sentencepiece(replacements, byte_fallback) if steps else None


def _sentencepiece(replacements: list[tuple[str, str]], byte_fallback: bool) -> Piece:
    def piece(token: str) -> bytes:
        if byte_fallback and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return piece


def byte_level(token: str) -> bytes:
    """Decode GPT-2's alphabet, which has a printable character for every byte; other text is kept."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
ALPHABET = _BYTE_OF.keys()
