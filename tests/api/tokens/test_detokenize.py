from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.tokens.detokenize import MAX_HELD_TOKENS, Detokenizer
from api.tokens.tokenizer import ByteTokenizer, Tokenizer
from tests.api.tokenizers import loaded

TOKEN_IDS = st.lists(st.integers(0, 420), max_size=40)


def shown(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool = True) -> list[str]:
    """The text emitted after each piece, and at the end."""
    detokenizer = Detokenizer(tokenizer, skip)
    text, after = "", []
    for piece in pieces:
        text += detokenizer.feed(piece)
        after.append(text)
    return [*after, text + detokenizer.finish()]


@given(token_ids=TOKEN_IDS, cuts=st.sets(st.integers(1, 39)), skip=st.booleans())
def test_what_is_emitted_depends_on_the_tokens_and_not_on_the_cuts(
    tokenizer: Tokenizer, token_ids: list[int], cuts: set[int], skip: bool
) -> None:
    one_by_one = shown(tokenizer, [[i] for i in token_ids], skip)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    pieces = [token_ids[start:end] for start, end in pairwise(bounds)]
    cut = shown(tokenizer, pieces, skip)
    assert cut[:-1] == [one_by_one[end - 1] if end else "" for end in bounds[1:]]
    assert cut[-1] == one_by_one[-1]


@given(token_ids=TOKEN_IDS, skip=st.booleans())
def test_a_byte_level_stream_is_what_the_library_decodes_at_once(
    byte_level: Tokenizer, token_ids: list[int], skip: bool
) -> None:
    # But for an added token that looks like the alphabet of bytes, which the library decodes to half a character.
    token_ids = [i for i in token_ids if byte_level.token_bytes(i) != "é!".encode()]
    assert shown(byte_level, [token_ids], skip)[-1] == byte_level.decode(token_ids, skip_special_tokens=skip)


def test_what_is_left_of_a_character_is_flushed_as_a_replacement() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.feed("a😀".encode()[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_continuation_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    [the] = [i for i in range(sentencepiece.vocab_size) if sentencepiece.token_bytes(i) == b" the"]
    assert Detokenizer(sentencepiece).feed([the, the]) == " the the"


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    end = max(byte_level.special_token_ids)
    assert Detokenizer(byte_level).feed([end]) == ""
    assert Detokenizer(byte_level, skip_special_tokens=False).feed([end]) == "<|im_end|>"


def test_a_skipped_special_token_does_not_break_a_character() -> None:
    first, *rest = "é".encode()
    assert Detokenizer(ByteTokenizer()).feed([first, ByteTokenizer.eos, *rest]) == "é"


def test_ids_beyond_the_vocabulary_are_silent(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed([10_000, 2**32 - 1]) == ""
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("tokens", [["fox", "##es", "the", "##re", ",", "the"]])
def test_a_decoder_that_looks_around_is_streamed_as_it_decodes(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[str]
) -> None:
    tokenizer = loaded("word_pieces", tmp_path_factory.getbasetemp())
    assert not tokenizer.joins_bytes
    token_ids = [["[UNK]", "the", "##re", "fox", "##es", ","].index(token) for token in tokens]
    assert shown(tokenizer, [[i] for i in token_ids])[-1] == "foxes there, the"
    assert tokenizer.decode(token_ids) == "foxes there, the"


def test_a_window_that_never_becomes_text_is_shown_in_the_end(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = loaded("word_pieces", tmp_path_factory.getbasetemp())
    detokenizer = Detokenizer(tokenizer)
    replacement = 7
    assert [detokenizer.feed([replacement]) for _ in range(MAX_HELD_TOKENS - 1)] == [""] * (MAX_HELD_TOKENS - 1)
    assert "\ufffd" in detokenizer.feed([replacement])
