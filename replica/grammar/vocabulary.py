"""The bytes of all tokens, as one message: for the engine and for the process that tries constraints."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from api.errors import invalid
from api.tokens.tokenizer import Tokenizer


class Vocabulary(Struct, frozen=True, array_like=True):
    tokens: list[bytes]  # tokens by id; empty where the tokenizer has none
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


def check_constrainable(tokenizer: Tokenizer, eos_ids: Sequence[int], param: str) -> None:
    """Raise ApiError 400 if no answer of this model can be constrained."""
    if tokenizer.joins_bytes and eos_ids:
        return
    why = "has no end-of-sequence token, which ends a constrained answer"
    if not tokenizer.joins_bytes:
        why = "has tokens whose text depends on their neighbours"
    raise invalid(f"{param} is set, but the model {why}; leave it out", param, "unsupported")


def packed_vocabulary(tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> bytes:
    """`size` tokens, as the model has them; more than the tokenizer's have no bytes and are never allowed."""
    tokens = [tokenizer.token_bytes(token) for token in range(size)]
    ends = tuple(token for token in eos_ids if token < size)
    special = sorted(token for token in tokenizer.special_token_ids.union(ends) if token < size)
    return msgspec.msgpack.encode(Vocabulary(tokens, tuple(special), ends))


unpacked_vocabulary: Callable[[bytes], Vocabulary] = msgspec.msgpack.Decoder(Vocabulary).decode
