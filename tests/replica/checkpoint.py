"""Greedy tokens of a published checkpoint, in each way that a prompt is computed or found, beside transformers'."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from replica.cache.lower import HOST
from replica.engine.engine import Engine
from tests.replica.models import Answer, ask, closing_engine, native, submit

BLOCK = 16
WAYS = ("cold", "cached", "from host memory", "resumed elsewhere")
STUCK_S = 600.0

Tokens = list[int]


class Said(NamedTuple):
    tokens: dict[str, list[Tokens]]  # by the way, those of each prompt
    logprobs: list[float]  # of the tokens of `text` after its first one


class Compared(NamedTuple):
    """One prompt's tokens beside those that transformers gives at the same places."""

    same: dict[str, int]
    margin: float  # between the two likeliest tokens, where that is least


def said(folder: Path, prompts: Sequence[Tokens], text: Tokens, new: int) -> Said:
    """One prompt after the other, greedy, in float32. Raise AssertionError if one was not found where it should be."""
    longest = max(map(len, [*prompts, text])) + new
    one = {"block_size": BLOCK, "num_blocks": longest // BLOCK + 4, "max_model_len": longest, "dtype": "float32"}
    host = {"host_blocks": sum((len(prompt) + new) // BLOCK + 1 for prompt in prompts)}
    tokens: dict[str, list[Tokens]] = {way: [] for way in WAYS}
    with closing_engine(native(folder, **one, **host)) as engine:
        for prompt in prompts:
            tokens["cold"].append(_answer(engine, prompt, new).token_ids)
            again = _answer(engine, prompt, new)
            assert again.cached_tokens == len(prompt) - 1
            tokens["cached"].append(again.token_ids)
        for prompt in prompts:
            found = _answer(engine, prompt, new)
            assert found.cached_tokens >= (len(prompt) - 1) // BLOCK * BLOCK
            tokens["from host memory"].append(found.token_ids)
        loaded = engine.scheduler.transfers.loaded_tokens.get(HOST, 0)
        left = sum(map(len, prompts)) - longest  # so many were not in the blocks of the device
        assert loaded > left / 2, f"only {loaded} tokens came from host memory"
        engine.reset()  # as a replica that has never seen the prompts
        for number, (prompt, whole) in enumerate(zip(prompts, tokens["cold"], strict=True)):
            cut = 1 + number % (new - 1)
            tokens["resumed elsewhere"].append([*whole[:cut], *_answer(engine, prompt, new, whole[:cut]).token_ids])
        [answer] = ask(engine, [text], max_tokens=1, prompt_logprobs=0)
    assert answer.prompt_logprobs is not None
    return Said(tokens, [found.logprob for found in answer.prompt_logprobs])


def _answer(engine: Engine, prompt: Tokens, new: int, output: Tokens | None = None) -> Answer:
    """The threads that move blocks are let in between two steps."""
    answer, began_s = Answer(), time.monotonic()
    submit(engine, 0, prompt, output or (), max_tokens=new, top_logprobs=0)
    while engine.busy:
        assert time.monotonic() - began_s < STUCK_S, "the prompt is not answered"
        for output_part in engine.step():
            answer.add(output_part)
        time.sleep(0)
    return answer


@torch.no_grad()
def compared(model: Any, prompts: Sequence[Tokens], found: Said) -> list[Compared]:
    """Transformers' likeliest token after the prompt and each token of the cold answer, computed at once."""
    answers = []
    for number, prompt in enumerate(prompts):
        cold = found.tokens["cold"][number]
        asked = torch.tensor([[*prompt, *cold[:-1]]])
        logits = model(asked, logits_to_keep=len(cold)).logits[0]
        likeliest = logits.argmax(-1).tolist()
        first, second = logits.topk(2).values.unbind(-1)
        same = {
            way: sum(a == b for a, b in zip(of_each[number], likeliest, strict=True))
            for way, of_each in found.tokens.items()
        }
        answers.append(Compared(same, float((first - second).min())))
    return answers


@torch.no_grad()
def perplexities(model: Any, text: Tokens, found: Said) -> tuple[float, float]:
    """Ours and transformers'."""
    expected = model(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    theirs = expected.gather(1, torch.tensor(text[1:])[:, None]).mean()
    return math.exp(-sum(found.logprobs) / len(found.logprobs)), math.exp(-theirs)
