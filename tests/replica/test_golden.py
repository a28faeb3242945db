"""The native engine equals transformers, token by token, with any caching, chunking, batching or preemption.

Tolerances: in float32 the greedy tokens are equal and log probabilities differ by less than 1e-4. In bfloat16 both
round, at other places; the mean error of log probabilities, against float32, is at most 1.5 times transformers'.
"""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.runners.request import Scheduled
from replica.runners.runner import Finish
from tests.replica.models import MODELS, VOCABULARY, Answer, ask, finish, logits, native, reference, saved, submit

models = pytest.mark.parametrize("name", MODELS)
# What differs least between models: two in the fast tests.
some_models = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("llama3", "qwen3") else pytest.mark.grid) for name in MODELS]
)
LENGTHS = (1, 7, 15, 16, 17, 40, 100, 131)
# What must not change a bit, for two models that differ in everything; and the hardest of it for all.
HARDEST: list[dict[str, object]] = [
    {"max_num_batched_tokens": 23, "block_size": 7, "num_blocks": 200},
    {"num_blocks": 14, "max_num_batched_tokens": 64},
]
OTHERS: list[dict[str, object]] = [
    {"enable_prefix_caching": False, "enable_partial_reuse": False, "max_num_batched_tokens": 16},
    {"enable_partial_reuse": False, "threads": 3, "max_num_batched_tokens": 300},
    {"max_num_seqs": 1, "block_size": 1, "num_blocks": 900},
]
CASES = [("llama-odd", HARDEST[0]), *(("qwen3", changes) for changes in [HARDEST[1], *OTHERS])]
REST = [
    (name, changes)
    for name in MODELS
    for changes in [*HARDEST, *(OTHERS if name in ("llama-odd", "qwen3") else [])]
    if (name, changes) not in CASES
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def assert_is_transformers(name: str, prompt: Sequence[int], answer: Answer) -> None:
    said = logits(name, [*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :]
    assert said.argmax(-1).tolist() == answer.token_ids
    expected = said.log_softmax(-1)
    for token, row, found in zip(answer.token_ids, expected, answer.logprobs, strict=True):
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(3)
        assert [alternative for alternative, _ in found.top] == best.indices.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@cache
def plain(name: str, folder: Path) -> tuple[list[list[int]], list[Answer]]:
    """Prompts, some with shared prefixes, and their answers one by one and without a cache."""
    shared = prompts([40], seed=2)[0]
    asked = [*prompts(), shared, [*shared[:37], 5, 6, 7], [*shared, 8, 9], shared]
    return asked, ask(native(saved(name, folder), enable_prefix_caching=False, max_num_seqs=1), asked)


@models
def test_a_batch_of_mixed_lengths_is_answered_as_by_transformers(name: str, folder: Path) -> None:
    asked = prompts()
    for prompt, answer in zip(asked, ask(native(saved(name, folder)), asked), strict=True):
        assert_is_transformers(name, prompt, answer)


@some_models
def test_greedy_generation_is_that_of_transformers(name: str, folder: Path) -> None:
    (prompt,) = prompts([33])
    (answer,) = ask(native(saved(name, folder)), [prompt], max_tokens=48)
    model: Any = reference(name)  # its types say that it cannot generate
    generated = model.generate(
        torch.tensor([prompt]), max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert answer.token_ids == generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "changes"), [*CASES, *(pytest.param(*case, marks=pytest.mark.grid) for case in REST)], ids=str
)
def test_no_bit_depends_on_caching_chunks_batches_or_preemption(
    name: str, changes: dict[str, object], folder: Path
) -> None:
    asked, expected_answers = plain(name, folder)
    engine = native(saved(name, folder), **changes)
    for _ in range(2):  # the second time warm
        for expected, answer in zip(expected_answers, ask(engine, asked), strict=True):
            assert answer.token_ids == expected.token_ids
            if "attention" not in changes:
                assert answer.logprobs == expected.logprobs
    if changes.get("num_blocks") == 14:
        assert engine.scheduler.preemptions, "nothing was preempted"
    if engine.config.enable_prefix_caching and changes.get("num_blocks") != 14:
        assert ask(engine, asked[-1:])[0].cached_tokens, "nothing was cached"


@some_models
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str, folder: Path) -> None:
    asked = prompts([16, 45, 100])
    engine = native(saved(name, folder), dtype="bfloat16")
    mine, theirs = [], []
    for prompt, answer in zip(asked, ask(engine, asked), strict=True):
        said = [*prompt, *answer.token_ids[:-1]]
        exact, rounded = (
            logits(name, said, dtype)[len(prompt) - 1 :].log_softmax(-1) for dtype in (torch.float32, torch.bfloat16)
        )
        drawn = torch.tensor(answer.token_ids)[:, None]
        found = torch.tensor([logprobs.logprob for logprobs in answer.logprobs])
        mine.append((exact.gather(1, drawn)[:, 0] - found).abs())
        theirs.append((exact.gather(1, drawn) - rounded.gather(1, drawn))[:, 0].abs())
        assert (exact.max(-1).values - exact.gather(1, drawn)[:, 0] < 0.5).all(), "another token was much more likely"
    assert torch.cat(mine).mean() < 1.5 * torch.cat(theirs).mean() + 0.01


@some_models
def test_prompt_logprobs_are_those_of_transformers(name: str, folder: Path) -> None:
    (prompt,) = prompts([70])
    engine = native(saved(name, folder), max_num_batched_tokens=32)
    ask(engine, [prompt])  # a warm cache is no help, and no harm
    (answer,) = ask(engine, [prompt], prompt_logprobs=2)
    assert answer.prompt_logprobs is not None and answer.cached_tokens == 0
    expected = logits(name, prompt)[:-1].log_softmax(-1)
    for token, row, found in zip(prompt[1:], expected, answer.prompt_logprobs, strict=True):
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [alternative for alternative, _ in found.top] == row.topk(2).indices.tolist()
        assert found.rank == 1 + int((row > row[token]).sum())


def test_a_request_that_was_cut_continues_elsewhere_with_the_same_bits(folder: Path) -> None:
    (prompt,) = prompts([50])
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"temperature": 1.2, "seed": 8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    ]
    for sampling in cases:
        (whole,) = ask(native(saved("qwen3", folder)), [prompt], max_tokens=40, **sampling)
        for cut in (1, 13, 39):
            elsewhere = native(saved("qwen3", folder))
            submit(elsewhere, 0, prompt, whole.token_ids[:cut], max_tokens=40, **sampling)
            rest = finish(elsewhere)[0]
            assert rest.token_ids == whole.token_ids[cut:]
            assert rest.logprobs == whole.logprobs[cut:]


def test_a_block_may_be_copied_from_before_it_is_anothers_to_write_on(folder: Path) -> None:
    """With little room a step does both, and whoever decodes is computed first."""
    asked = []
    for group in range(4):
        [shared, end, other] = prompts([40, 1, 9], seed=100 + group)
        asked += [[*shared, *end], [*shared[:37], *other]]
    engine, copied = native(saved("qwen3", folder), num_blocks=20), 0
    expected = ask(native(saved("qwen3", folder), enable_prefix_caching=False), asked)
    start = engine.runner.start

    def watched(batch: Sequence[Scheduled]) -> Finish:
        nonlocal copied
        sources: list[int] = []
        for copy in filter(None, (scheduled.copy for scheduled in batch)):
            copied += copy.target in sources
            sources.append(copy.source)
        return start(batch)

    engine.runner.start = watched  # type: ignore[method-assign]
    for _ in range(3):
        for found, answer in zip(ask(engine, asked), expected, strict=True):
            assert (found.token_ids, found.logprobs) == (answer.token_ids, answer.logprobs)
    assert copied, "no step did both"
