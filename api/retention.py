"""Beginnings of a prompt that a client asks to keep in the cache: for how long, and how many tokens they are.

The tokens are never more than the client means: where a template hides the end, or a token reaches beyond it, they are
fewer. `api.prompts.breakpoints` finds the ends in a request.
"""

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from api.tokens.tokenizer import Tokenizer

TTL_S = {"5m": 300.0, "1h": 3600.0}
DAY_S = MAX_TTL_S = 86400.0
MAX_RETAINED = 3  # beginnings of one prompt: one for each time
MAX_TOKENS = 2**31 - 1
TENANT_CHARACTERS = (
    32  # at the beginning of a salt: a router puts its key's own there, and what the client adds behind it
)

# Stands where the text to keep ends. It is no word's continuation, and no filter of a template changes its letters.
SHOWN = "END_OF_THE_RETAINED_TEXT"
END = f"‡{SHOWN}"

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_TTL_S)]


def tenant_of(cache_salt: str | None) -> str | None:
    """The tenant whose share of the retained blocks a request takes, whatever its client adds to the salt."""
    return None if cache_salt is None else cache_salt[:TENANT_CHARACTERS]


class CacheControl(Struct, frozen=True, omit_defaults=True):
    """Keep the prompt up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> float:
        return TTL_S[self.ttl or "5m"]


class Retain(Struct, frozen=True):
    """Keep the first `tokens` of the prompt until nobody has used them for `ttl_s`."""

    tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    ttl_s: Seconds


Retained: TypeAlias = Annotated[list[Retain], Meta(max_length=MAX_RETAINED)]


class Breakpoint(NamedTuple):
    """The end of a beginning to keep: a tool, a message, or a part of one."""

    ttl_s: float
    tool: int | None = None
    message: int = -1
    part: int | None = None  # None: the whole message


def shows_end(text: str) -> bool:
    """Tell whether a template has shown the end: where it has not, nobody knows where the beginning ends."""
    return SHOWN in text


def common_tokens(token_ids: Sequence[int], others: Sequence[int]) -> int:
    """Count the tokens that two prompts have in common."""
    return sum(1 for _ in takewhile(bool, map(eq, token_ids, others)))


def common_packed(packed: bytes, other: bytes) -> int:
    """The same of token ids that are packed, without a look at each."""
    same, differ = 0, min(len(packed), len(other)) // 4 + 1
    while differ - same > 1:
        middle = (same + differ) // 2
        if packed[4 * same : 4 * middle] == other[4 * same : 4 * middle]:
            same = middle
        else:
            differ = middle
    return same


def tokens_within(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> int:
    """Count the tokens, from the first, that spell the beginning of a text."""
    encoded = text.encode(errors="replace")
    if not tokenizer.joins_bytes:
        return common_tokens(token_ids, tokenizer.encode(text, add_special_tokens=False))
    token_bytes, count, end = tokenizer.token_bytes, 0, 0
    for token_id in token_ids:
        piece = token_bytes(token_id)
        if not count and piece[:1] == b" " and not encoded.startswith(b" "):
            piece = piece[1:]  # SentencePiece begins a text with a space
        if not piece or not encoded.startswith(piece, end):
            break
        count, end = count + 1, end + len(piece)
    return count
