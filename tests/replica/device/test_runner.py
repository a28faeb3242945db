"""The GPU runner gives the CPU runner's results, although it runs a step ahead."""

import random
from pathlib import Path
from typing import Any

import pytest

from replica.engine.engine import Engine
from replica.messages import TokenLogprobs
from tests.replica.device.hosts import FEW_ROWS, HostAccelerator, on_device
from tests.replica.models import VOCABULARY, Answer, ask, finish, native, saved, submit

CLOSE = 1e-3  # of log probabilities: sums are added in other orders
SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1e300, "seed": 7},
    {"temperature": 1.0, "top_p": 0.7, "seed": 3},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 11},
]
SHAPED: list[dict[str, Any]] = [
    {"logit_bias": {5: 8.0, 9: -100.0}},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3},
    {"frequency_penalty": 1.1, "temperature": 0.9, "seed": 2},
    {"min_tokens": 6, "stop_token_ids": tuple(range(0, VOCABULARY, 2))},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3", tmp_path_factory.mktemp("models"))


def prompts(seed: int, count: int, longest: int = 90) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCABULARY) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def same(found: Answer, expected: Answer) -> None:
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
    for mine, other in zip(found.logprobs, expected.logprobs, strict=True):
        same_logprobs(mine, other)


def same_logprobs(mine: TokenLogprobs, other: TokenLogprobs) -> None:
    assert mine.rank == other.rank
    assert mine.logprob == pytest.approx(other.logprob, abs=CLOSE)
    assert [token for token, _ in mine.top] == [token for token, _ in other.top]


@pytest.mark.parametrize(
    ("name", "graphs"),
    [("llama-odd", True), ("qwen3", True), ("llama-biased", False), ("llama3", False), ("mistral", False)],
)
def test_all_models_say_the_same(name: str, graphs: bool, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    asked = prompts(1, 5)
    for found, expected in zip(ask(on_device(folder, graphs=graphs), asked), ask(native(folder), asked), strict=True):
        same(found, expected)


def each_sampling(engine: Engine, top_logprobs: int | None) -> dict[int, Answer]:
    """Requests that ask for each kind of sampling, beside each other."""
    for number, (sampling, prompt) in enumerate(zip([*SAMPLED, *SHAPED], prompts(2, 9), strict=True)):
        submit(engine, number, prompt, **sampling | {"max_tokens": 24, "top_logprobs": top_logprobs})
    return finish(engine)


@pytest.mark.parametrize("top_logprobs", [pytest.param(None, marks=pytest.mark.grid), 2])
def test_whatever_is_asked_for_comes_out_the_same(folder: Path, top_logprobs: int | None) -> None:
    expected = each_sampling(native(folder), top_logprobs)
    for number, answer in each_sampling(on_device(folder), top_logprobs).items():
        same(answer, expected[number])


def mixed(engine: Engine) -> dict[int, Answer]:
    """Requests of all kinds, one after the other, with prompts that are computed in parts while others end."""
    chance = random.Random(5)
    answers: dict[int, Answer] = {}
    for number, prompt in enumerate(prompts(3, 16)):
        sampling = chance.choice([*SAMPLED, *SHAPED])
        top_logprobs = chance.choice([None, None, 1])
        submit(engine, number, prompt, **sampling | {"max_tokens": chance.randint(1, 20), "top_logprobs": top_logprobs})
        for _ in range(chance.randrange(4)):
            for output in engine.step():
                answers.setdefault(output.id, Answer()).add(output)
        engine.check()
    for number, answer in finish(engine).items():
        so_far = answers.setdefault(number, Answer())
        so_far.token_ids += answer.token_ids
        so_far.logprobs += answer.logprobs
        so_far.finish_reason = answer.finish_reason
    return answers


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 17},
        *(
            pytest.param(changes, marks=pytest.mark.grid)
            for changes in ({}, {"max_num_batched_tokens": 40}, {"enable_prefix_caching": False}, {"block_size": 5})
        ),
    ],
    ids=str,
)
def test_a_mixed_load_gets_the_same_answers(folder: Path, changes: dict[str, Any]) -> None:
    """Also with prompts in chunks, or when blocks run out and requests have to start over."""
    fields = {"max_num_seqs": 8, **changes}
    engine = on_device(folder, **fields)
    found, expected = mixed(engine), mixed(native(folder, **fields))
    assert found.keys() == expected.keys()
    for number, answer in found.items():
        same(answer, expected[number])
    if "num_blocks" in changes:
        assert engine.scheduler.preemptions


def test_what_is_cached_need_not_be_computed(folder: Path) -> None:
    """Whole blocks, and the beginning of one that is copied."""
    engine = on_device(folder)
    (prompt,) = prompts(4, 1)
    prompt = (prompt * 9)[:100]
    (first,) = ask(engine, [prompt])
    fork = [*prompt[:70], *prompts(5, 1)[0]]
    again, other = ask(engine, [prompt])[0], ask(engine, [fork])[0]
    assert (again.cached_tokens, other.cached_tokens) == (99, 70)
    same(again, first)
    same(other, ask(native(folder), [fork])[0])


@pytest.mark.parametrize(
    ("length", "fields", "eager"),
    [
        (1, {}, 0),
        (FEW_ROWS // 5, {}, 0),
        (FEW_ROWS // 5 + 1, {}, 1),
        (FEW_ROWS // 5, {"prompt_logprobs": 1}, 1),
    ],
)
def test_all_steps_but_large_ones_with_prompts_are_replays(
    length: int, fields: dict[str, Any], eager: int, folder: Path
) -> None:
    """Log probabilities of prompts are not available from a graph."""
    accelerator = HostAccelerator()
    engine = on_device(folder, accelerator, max_num_seqs=6)
    ask(engine, [[number] * length for number in range(5)], max_tokens=12, **fields)
    assert (engine.steps, accelerator.replays) == (12, 12 - eager)


def test_a_step_is_begun_before_the_last_one_is_waited_for(folder: Path) -> None:
    accelerator = HostAccelerator()
    engine = on_device(folder, accelerator)
    waits = accelerator.waits
    submit(engine, 1, [1, 2, 3], top_logprobs=None)
    engine.step()
    engine.step()
    assert accelerator.waits - waits == 1
    assert engine.scheduler.running[0].drawing == 1
    finish(engine)
