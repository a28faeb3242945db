"""A published checkpoint answers as in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from api.tokens.tokenizer import HfTokenizer
from replica.model.gguf.weights import GgufTensors
from tests.late import transformers
from tests.replica import smollm2
from tests.replica.checkpoint import WAYS, compared, perplexities, said
from tests.replica.model.gguf.test_tokenizer import TEXTS

LICENSE = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXT = LICENSE[600:1200]  # a page of English, whose perplexity is computed too
NEW = 6


def network(folder: Path) -> Any:
    """Transformers' own. The benchmark has it read the file, too, which takes half a minute."""
    config, tensors = transformers.LlamaConfig.from_pretrained(folder), GgufTensors(folder / "model.gguf")
    weights = {name: tensors.get_tensor(name) for name in list(tensors.keys())}
    return transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)


@pytest.mark.grid
@pytest.mark.timeout(300)
def test_a_published_checkpoint_says_in_every_way_what_it_says_in_transformers() -> None:
    """One test, because the model is loaded for it, and each worker would do so again."""
    folder = smollm2.folder()
    tokenizer = HfTokenizer(folder)
    texts = (CHAT, "".join(TEXTS[:6])[:200], TEXTS[10] + TEXTS[11], TEXT)  # a conversation, languages, code
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    found, model = said(folder, prompts, prompts[-1], NEW), network(folder)
    for answer in compared(model, prompts, found):
        assert answer.same == dict.fromkeys(WAYS, NEW), f"the margin is {answer.margin}"
    assert "Paris" in tokenizer.decode(found.tokens["cold"][0])
    ours, theirs = perplexities(model, prompts[-1], found)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours < 50, "weights in a wrong order would make a text of this kind unlikely"
