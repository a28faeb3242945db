"""A published checkpoint answers as in transformers, in each way that a prompt is computed or found."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from api.tokens.tokenizer import HfTokenizer
from replica.cache.lower import HOST
from replica.engine.engine import Engine
from replica.model.gguf.weights import GgufTensors
from tests.late import transformers
from tests.replica import smollm2
from tests.replica.model.gguf.test_tokenizer import TEXTS
from tests.replica.models import Answer, ask, closing_engine, native, submit

LICENSE = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXT = LICENSE[600:1200]  # a page of English, whose log probabilities are compared, too
NEW, BLOCK = 6, 16
STUCK_S = 250.0


def network(folder: Path) -> Any:
    config, tensors = transformers.LlamaConfig.from_pretrained(folder), GgufTensors(folder / "model.gguf")
    weights = {name: tensors.get_tensor(name) for name in list(tensors.keys())}
    return transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)


def answer_of(engine: Engine, prompt: Sequence[int], output: Sequence[int] = ()) -> Answer:
    """The threads that move blocks are let in between two steps."""
    answer, began_s = Answer(), time.monotonic()
    submit(engine, 0, prompt, output, max_tokens=NEW, top_logprobs=0)
    while engine.busy:
        assert time.monotonic() - began_s < STUCK_S, "the prompt is not answered"
        for part in engine.step():
            answer.add(part)
        time.sleep(0)
    return answer


@pytest.mark.grid
@pytest.mark.timeout(300)
@torch.no_grad()
def test_a_published_checkpoint_says_in_every_way_what_it_says_in_transformers() -> None:
    """One test, because the model is loaded for it, and each worker would do so again."""
    folder = smollm2.folder()
    tokenizer, model = HfTokenizer(folder), network(folder)
    texts = (CHAT, "".join(TEXTS[:6])[:200], TEXTS[10] + TEXTS[11], TEXT)  # a conversation, languages, code
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    longest = max(map(len, prompts)) + NEW
    sizes = {"block_size": BLOCK, "num_blocks": longest // BLOCK + 4, "max_model_len": longest, "dtype": "float32"}
    host_blocks = sum((len(prompt) + NEW) // BLOCK + 1 for prompt in prompts)
    said = []
    with closing_engine(native(folder, **sizes, host_blocks=host_blocks)) as engine:
        for prompt in prompts:
            cold, cached = answer_of(engine, prompt), answer_of(engine, prompt)
            assert cached.cached_tokens == len(prompt) - 1
            logits = model(torch.tensor([[*prompt, *cold.token_ids[:-1]]]), logits_to_keep=NEW).logits[0]
            assert cold.token_ids == cached.token_ids == logits.argmax(-1).tolist()
            said.append(cold.token_ids)
        assert "Paris" in tokenizer.decode(said[0])
        for prompt, whole in zip(prompts, said, strict=True):
            from_host = answer_of(engine, prompt)
            assert from_host.token_ids == whole and from_host.cached_tokens >= (len(prompt) - 1) // BLOCK * BLOCK
        loaded, left = engine.scheduler.transfers.loaded_tokens.get(HOST, 0), sum(map(len, prompts)) - longest
        assert loaded > left / 2, f"only {loaded} tokens came from host memory"
        engine.reset()  # now it is like a replica that has never seen the prompts
        for cut, (prompt, whole) in enumerate(zip(prompts, said, strict=True), start=1):
            assert answer_of(engine, prompt, whole[:cut]).token_ids == whole[cut:]
        [scored] = ask(engine, [prompts[-1]], max_tokens=1, prompt_logprobs=0)
    expected = model(torch.tensor([prompts[-1]])).logits[0, :-1].log_softmax(-1)
    theirs = expected.gather(1, torch.tensor(prompts[-1][1:])[:, None])[:, 0]
    assert scored.prompt_logprobs is not None
    assert [one.logprob for one in scored.prompt_logprobs] == pytest.approx(theirs.tolist(), abs=1e-3)
    assert theirs.mean() > -4, "weights in a wrong order would make a text of this kind unlikely"
