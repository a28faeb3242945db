"""Bounds the text that one token stands for, to refuse a text that cannot fit before it is encoded.

The bound is never less than what a token can stand for, but for the tokenizers that drop text without a trace (white
space between words, a word that is not known): for them there is no such bound, and `DROPPED` is a guess.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, models

from api.tokens.pieces import ALPHABET

# A token counts, where text can be dropped, for this multiple of its length. A text that fits only because it is
# nearly all white space or unknown words is refused there.
DROPPED = 16
NORMAL_FORMS = 4  # a mathematical letter has 4 bytes and becomes one of ASCII; composing saves less
LOWERCASE = 3  # the sign of kelvin becomes a k

_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})  # they cut, and drop nothing


def max_bytes_per_token(tokenizer: Tokenizer) -> int:
    normalizers = list(_steps(_state(tokenizer.normalizer), "normalizers"))
    pre_tokenizers = list(_steps(_state(tokenizer.pre_tokenizer), "pretokenizers"))
    byte_level = any(step["type"] == "ByteLevel" for step in normalizers + pre_tokenizers)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    keeps_all = (
        isinstance(tokenizer.model, models.BPE)
        and vocabulary.keys() >= (ALPHABET if byte_level else _BYTES)
        and (byte_level or tokenizer.model.byte_fallback)
        and all(step["type"] in _KEEPING or step.get("behavior", "Removed") != "Removed" for step in pre_tokenizers)
        and not any(token.lstrip or token.rstrip for token in added)  # they take all the white space beside them
    )
    in_vocabulary = max((len(token) if byte_level else _size(token) for token in vocabulary), default=0)
    longest = max(1, in_vocabulary, *(_size(token.content) for token in added))
    shrinking = math.prod(map(_shrinking, normalizers))
    return longest * (int(shrinking) if keeps_all and shrinking != math.inf else DROPPED)


def _state(part: Any) -> Mapping[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _steps(part: Mapping[str, Any] | None, within: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
    for step in part.get(within, ()):
        yield from _steps(step, within)


def _shrinking(normalizer: Mapping[str, Any]) -> float:
    """How many times longer a text can be than its normalized form."""
    match normalizer:
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD"}:
            return NORMAL_FORMS
        case {"type": "Lowercase"}:
            return LOWERCASE
        case {"type": "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
            return max(1, math.ceil(_size(old) / _size(new)))
    return math.inf


def _size(text: str) -> int:
    return len(text.encode())
