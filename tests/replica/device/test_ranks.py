"""Several processes with a device each answer as one does; here their devices are a CPU, and they meet by gloo."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from replica.config import LoraModule
from replica.engine.engine import Engine
from tests.replica.device.hosts import on_devices
from tests.replica.device.test_runner import each_sampling, mixed, prompts, same, same_logprobs
from tests.replica.lora.adapters import adapted_logits, saved_adapter
from tests.replica.models import ask, closing_engine, finish, native, saved, submit

SMALL = {"max_num_batched_tokens": 64, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Engine]:
    """Two ranks of a model with biases, steps in graphs, and adapters."""
    modules = tuple(LoraModule(name, str(saved_adapter("llama", name, folder))) for name in ("all", "patterns"))
    with closing_engine(on_devices(saved("llama", folder), 2, lora_modules=modules, **SMALL)) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return native(saved("llama", folder), **SMALL)


def test_prompts_are_answered_alike_cold_and_warm(two: Engine, alone: Engine) -> None:
    asked = prompts(1, 5)
    for _ in range(2):
        for found, expected in zip(ask(two, asked), ask(alone, asked), strict=True):
            same(found, expected)
            assert found.cached_tokens == expected.cached_tokens


def test_whatever_is_asked_for_comes_out_the_same(two: Engine, alone: Engine) -> None:
    expected = each_sampling(alone, 2)
    for number, answer in each_sampling(two, 2).items():
        same(answer, expected[number])


@pytest.mark.grid
def test_requests_of_all_kinds_beside_each_other_come_out_the_same(two: Engine, alone: Engine) -> None:
    found, expected = mixed(two), mixed(alone)
    assert found.keys() == expected.keys()
    for number, answer in found.items():
        same(answer, expected[number])


def test_log_probabilities_of_prompts_are_the_same(two: Engine, alone: Engine) -> None:
    asked = prompts(4, 3)
    fields = {"prompt_logprobs": 2, "max_tokens": 2}
    for found, expected in zip(ask(two, asked, **fields), ask(alone, asked, **fields), strict=True):
        assert found.prompt_logprobs is not None and expected.prompt_logprobs is not None
        for mine, other in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
            same_logprobs(mine, other)


def test_adapters_are_computed_like_peft(two: Engine) -> None:
    asked = [(adapter, prompt) for adapter in ("all", None, "patterns") for prompt in prompts(5, 2)]
    for number, (adapter, prompt) in enumerate(asked):
        submit(two, number, prompt, lora_name=adapter)
    answers = finish(two)
    for number, (adapter, prompt) in enumerate(asked):
        if adapter is not None:
            text = [*prompt, *answers[number].token_ids]
            said = adapted_logits("llama", adapter, text[:-1])[len(prompt) - 1 :]
            assert said.argmax(-1).tolist() == answers[number].token_ids
