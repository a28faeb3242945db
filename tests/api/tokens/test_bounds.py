import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from api.tokens.bounds import DROPPED, LOWERCASE, NORMAL_FORMS, max_bytes_per_token
from tests.api.tokenizers import byte_level, metaspace, sentencepiece, word_pieces


def normalized(normalizer: Any, make: Callable[[], Tokenizer] = byte_level) -> Tokenizer:
    tokenizer = make()
    tokenizer.normalizer = normalizer
    return tokenizer


def split(behavior: str) -> Tokenizer:
    tokenizer = byte_level()
    byte_level_step = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", behavior), byte_level_step])
    return tokenizer


def greedy_token() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|mask|>", lstrip=True)])
    return tokenizer


def spaces_to_marks() -> Tokenizer:
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return normalized(normalizers.Sequence(steps), sentencepiece)


LONGEST = max(map(len, byte_level().get_vocab(with_added_tokens=False)))  # one character for each byte
KEEPING: dict[str, tuple[Tokenizer, int]] = {
    "byte_level": (byte_level(), LONGEST),
    "sentencepiece": (sentencepiece(), len("▁the".encode())),
    "spaces_to_marks": (spaces_to_marks(), len("▁the".encode())),
    "split": (split("isolated"), LONGEST),
    "nfkc": (normalized(normalizers.NFKC()), LONGEST * NORMAL_FORMS),
    "nfc_lower": (
        normalized(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        LONGEST * NORMAL_FORMS * LOWERCASE,
    ),
    "replace": (normalized(normalizers.Replace("....", "a")), LONGEST * 4),
}
DROPPING: dict[str, tuple[Tokenizer, int]] = {
    "strip": (normalized(normalizers.Strip()), LONGEST),
    "removed": (normalized(normalizers.Replace("x", "")), LONGEST),
    "pattern": (normalized(normalizers.Replace(Regex(" +"), " ")), LONGEST),
    "split": (split("removed"), LONGEST),
    "greedy_token": (greedy_token(), LONGEST),
    "word_pieces": (word_pieces(), len("[UNK]")),
    "metaspace": (metaspace(), len("▁fox".encode())),
    "no bytes": (Tokenizer(models.BPE({"a": 0}, [])), 1),
}


@pytest.mark.parametrize("kind", KEEPING)
def test_a_token_stands_for_the_longest_one_at_most(kind: str) -> None:
    tokenizer, bound = KEEPING[kind]
    assert max_bytes_per_token(tokenizer) == bound


@pytest.mark.parametrize("kind", DROPPING)
def test_where_text_is_dropped_the_bound_is_generous(kind: str) -> None:
    tokenizer, longest = DROPPING[kind]
    assert max_bytes_per_token(tokenizer) == longest * DROPPED


PIECES = st.sampled_from(["café au lait", "the", " ", "....", "é", "e\u0301", "\u212a", "\U0001d400", "東", "<|end|>"])


@given(kind=st.sampled_from(sorted(KEEPING)), text=st.lists(PIECES | st.text(max_size=5), max_size=20).map("".join))
def test_no_text_has_fewer_tokens_than_the_bound_says(kind: str, text: str) -> None:
    tokenizer, bound = KEEPING[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(text.encode()) <= bound * len(token_ids)


def test_no_character_shrinks_more_than_is_reported() -> None:
    for character in map(chr, range(sys.maxunicode + 1)):
        if not 0xD800 <= ord(character) < 0xE000:
            size = len(character.encode())
            assert size <= LOWERCASE * len(character.lower().encode())
            for form in ("NFC", "NFKC", "NFD", "NFKD"):
                assert size <= NORMAL_FORMS * len(unicodedata.normalize(form, character).encode())
