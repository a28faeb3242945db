"""Added tokens as cuts of a text. `tests/router/prompts/test_piece_cache_property.py` tests the rule on texts."""

from typing import Any

import pytest
from tokenizers import AddedToken

from api.tokens.cuts import safe_cuts


def cuts(*contents: str, **flags: Any) -> tuple[str, ...]:
    return safe_cuts([AddedToken(content, **{"normalized": False} | flags) for content in contents])


def test_special_tokens_and_others_are_cuts() -> None:
    assert cuts("<|im_start|>", "<|im_end|>", "<s>") == ("<s>", "<|im_end|>", "<|im_start|>")
    assert cuts("<think>", special=False) == ("<think>",)
    assert cuts("<|user|>", rstrip=True) == ("<|user|>",), "text that a marker takes after itself belongs to its piece"


@pytest.mark.parametrize("flag", ["lstrip", "single_word", "normalized"])
def test_a_token_that_depends_on_its_left_context_is_no_cut(flag: str) -> None:
    assert cuts("<s>", **{flag: True}) == ()


@pytest.mark.parametrize("content", ["word", "_x", "9", "\n\n", " <s>", "é", "東", "::", "<a<", ""])
def test_a_token_that_may_join_its_left_context_is_no_cut(content: str) -> None:
    assert cuts(content) == ()


def test_tokens_that_overlap_are_none() -> None:
    assert cuts("<s>", "<s><s>x") == ()
    assert cuts("<ab>", ":<a") == (":<a",)
    assert cuts("<a:b>", ":") == ("<a:b>",), "one marker contains the other"
