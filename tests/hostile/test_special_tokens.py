"""Texts that spell special tokens, or nearly."""

import random
import time

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from api.errors import ApiError
from api.special_tokens import SpelledTokens
from api.templates import Conversation


def found(spelled: SpelledTokens, text: str) -> str | None:
    try:
        spelled.check(Conversation(messages=[{"role": "user", "content": text}]))
    except ApiError as error:
        return error.message
    return None


def test_what_nearly_spells_thousands_of_tokens_takes_no_time() -> None:
    spelled = SpelledTokens(f"<unused{number}>" for number in range(6200))
    began = time.process_time()
    assert found(spelled, "<unused" * 8000) is None
    assert time.process_time() - began < 0.05
    assert "'<unused6199>'" in str(found(spelled, "<unused" * 10 + "6199>"))


def test_what_a_normalizer_makes_a_token_of_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[unk]": 1}, unk_token="[unk]"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", normalized=True)])
    text = "a \uff1c|im_start|\uff1e a"
    assert "<|im_start|>" in tokenizer.encode(text).tokens
    spelled = SpelledTokens(["<|im_start|>"])
    assert "spells the special token '<|im_start|>'" in str(found(spelled, text))
    assert found(spelled, "caf\u00e9 \uff1c|im_stop|\uff1e") is None


@pytest.mark.parametrize("seed", range(20))
def test_a_text_is_refused_if_and_only_if_it_contains_a_token(seed: int) -> None:
    chosen = random.Random(seed)
    tokens = ["".join(chosen.choices("<a|.", k=chosen.randint(1, 6))) for _ in range(10)]
    tokens += ["b" * length for length in range(20, 300)]  # each begins as the others do
    spelled = SpelledTokens(tokens)
    for _ in range(200):
        text = "".join(chosen.choices("<a|.b", k=8)) + "b" * chosen.choice((0, 19, 150))
        assert (found(spelled, text) is not None) is any(token in text for token in tokens)
