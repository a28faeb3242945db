"""A published checkpoint answers as in transformers; `python -m tests.bench checkpoint` tries far longer prompts."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from api.tokenizer import HfTokenizer
from replica.gguf.weights import GgufTensors
from tests.replica import smollm2
from tests.replica.checkpoint import WAYS, Said, compared, perplexities, said
from tests.replica.gguf.test_tokenizer import TEXTS

LICENSE = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
NEW = 6


@pytest.fixture(scope="module")
def model() -> Any:
    """Transformers' own network. The benchmark has it read the file, too, which takes half a minute."""
    folder = smollm2.folder()
    config, tensors = transformers.LlamaConfig.from_pretrained(folder), GgufTensors(folder / "model.gguf")
    weights = {name: tensors.get_tensor(name) for name in list(tensors.keys())}
    return transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights)


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer(smollm2.folder())


@pytest.fixture(scope="module")
def prompts(tokenizer: HfTokenizer) -> list[list[int]]:
    """A conversation, languages, code, and a page of English."""
    texts = (CHAT, "".join(TEXTS[:6])[:200], TEXTS[10] + TEXTS[11], LICENSE[600:1200])
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.fixture(scope="module")
def found(prompts: list[list[int]]) -> Said:
    return said(smollm2.folder(), prompts, prompts[-1], NEW, over_ranks=False)


@pytest.mark.timeout(300)
def test_tokens_are_those_of_transformers_in_every_way(model: Any, prompts: list[list[int]], found: Said) -> None:
    for answer in compared(model, prompts, found):
        assert answer.same == dict.fromkeys(WAYS, NEW), f"the margin is {answer.margin}"


@pytest.mark.timeout(300)
def test_perplexity_is_that_of_transformers_and_of_a_trained_model(
    model: Any, prompts: list[list[int]], found: Said
) -> None:
    ours, theirs = perplexities(model, prompts[-1], found)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours < 50, "weights in a wrong order would make a text of this kind unlikely"


def test_it_says_what_it_was_taught(tokenizer: HfTokenizer, found: Said) -> None:
    assert "Paris" in tokenizer.decode(found.tokens["cold"][0])
