"""Token ids by text, so that the past of a conversation is not encoded again at its next turn.

A text is cut before one special token of the model's. By a rule about tokenizers (`api.tokens.cuts`) this changes
nothing. We do not trust the rule blindly: `difference` compares the pieces of test texts with the whole.
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TypeAlias

from msgspec import Struct

from api.tokens.tokenizer import Tokenizer
from events.blocks import pack_tokens

# A piece is known by the text after its cut. What stands before the first cut is another kind of piece.
Key: TypeAlias = str | tuple[str]

ENTRY_BYTES = 160  # the dictionary's bytes per entry, measured
LARGEST_SHARE = 8  # no piece may take more of the cache than this part

_WORDS = ("", "a", "b c", "  d ", "e\n", "é", "\u0301", "東京", "\u200d👧", "'s", "1")
_TRIES = (*_WORDS, " ", "\n", "\n\n", "\t", "▁", "<", "|>")


class LookUp(Struct):
    """A text's pieces; `ids` holds None for each unknown one."""

    keys: list[Key]
    ids: list[bytes | None]
    unknown_bytes: int


class PieceCache:
    """An LRU cache of packed token ids by piece, for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, cut: str, capacity_bytes: int) -> None:
        self.cut = cut
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._tokenizer = tokenizer
        self._ids: OrderedDict[Key, bytes] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def look_up(self, text: str) -> LookUp:
        first, *others = text.split(self.cut)
        keys: list[Key] = [(first,), *others] if first else [*others]
        with self._lock:
            ids = list(map(self._ids.get, keys))
            touch = self._ids.move_to_end
            if None not in ids:
                for key in keys:
                    touch(key)
                return LookUp(keys, ids, 0)
            for key, known in zip(keys, ids, strict=True):
                if known is not None:
                    touch(key)
        # Never 0 for a piece, which would mean that nothing is left to encode.
        unknown = sum(
            1 + len(key[0] if isinstance(key, tuple) else key)
            for key, known in zip(keys, ids, strict=True)
            if known is None
        )
        return LookUp(keys, ids, unknown)

    def encode(self, found: LookUp) -> bytes:
        """Encode the unknown pieces, and return all ids of the text, packed."""
        if not found.unknown_bytes:
            return b"".join(found.ids)  # type: ignore[arg-type]  # nothing is None
        pieces: list[bytes] = []
        for key, known in zip(found.keys, found.ids, strict=True):
            # Another thread, or an equal piece of this text, may have added it.
            ids = self._ids.get(key) if known is None else known
            if ids is None:
                text = key[0] if isinstance(key, tuple) else self.cut + key
                ids = pack_tokens(self._tokenizer.encode(text, add_special_tokens=False))
                size = _entry_bytes(key, ids)
                if size * LARGEST_SHARE <= self.capacity_bytes:
                    with self._lock:
                        if key not in self._ids:
                            self._ids[key] = ids
                            self.used_bytes += size
                        while self.used_bytes > self.capacity_bytes:
                            self.used_bytes -= _entry_bytes(*self._ids.popitem(last=False))
            pieces.append(ids)
        return b"".join(pieces)

    def clear(self) -> None:
        with self._lock:
            self._ids.clear()
            self.used_bytes = 0

    def check(self) -> None:
        with self._lock:
            assert self.used_bytes == sum(_entry_bytes(key, ids) for key, ids in self._ids.items())
            assert self.used_bytes <= self.capacity_bytes


def _entry_bytes(key: Key, ids: bytes) -> int:
    text = key[0] if isinstance(key, tuple) else key
    return ENTRY_BYTES + sys.getsizeof(text) + sys.getsizeof(ids)


def best_cut(cuts: Iterable[str], conversation: str) -> str | None:
    """The token that cuts the conversation into the most pieces; on a tie, the one that occurs last.

    The next turn changes only the text after it.
    """
    found = Counter({cut: conversation.count(cut) for cut in cuts if cut in conversation})
    return max(found, key=lambda cut: (found[cut], conversation.rfind(cut)), default=None)


def tries(cut: str, conversations: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """Test texts that would reveal a difference made by cutting."""
    beside = [*_TRIES, *others]
    pairs = [f"{left}{cut}{right}" for left in beside for right in beside]
    return [*conversations, *beside, "".join(pairs), *pairs]


def difference(tokenizer: Tokenizer, cut: str, texts: Sequence[str]) -> str | None:
    """The first text with other tokens in pieces than as a whole, if there is one."""
    cache = PieceCache(tokenizer, cut, sum(map(len, texts)) * 64 + 2**20)
    for text in texts:
        whole = pack_tokens(tokenizer.encode(text, add_special_tokens=False))
        if any(cache.encode(cache.look_up(text)) != whole for _ in ("cold", "warm")):
            return text
    return None
