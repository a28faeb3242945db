"""Several processes that share a model answer as one does, whatever is cached, cut, evicted or continued."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from replica.cache.lower import DISK, HOST
from replica.config import LoraModule
from replica.engine.engine import Engine
from replica.process import kv_layout_of
from tests.events.processes import wait_until
from tests.replica.lora.adapters import adapted_logits, saved_adapter
from tests.replica.models import Answer, ask, finish, logits, native, saved, submit
from tests.replica.parallel.conftest import Started, closing_engine
from tests.replica.test_golden import assert_is_transformers, prompts

# Odd sizes, tied embeddings, and more ranks than KV heads (2).
SHARED = [
    ("llama-odd", 2),
    ("qwen3", 4),
    *(
        pytest.param(name, ranks, marks=pytest.mark.grid)
        for name, ranks in (("llama-biased", 2), ("llama3", 2), ("mistral", 2), ("qwen2", 4))
    ),
]


@pytest.fixture(scope="module")
def adapted(folder: Path, shared: Started) -> Started:
    """Engines with adapters, by model and number of ranks. They are shared: a process takes seconds to start."""

    def started(name: str, ranks: int) -> Engine:
        adapters = (LoraModule(adapter, str(saved_adapter(name, adapter, folder))) for adapter in ("all", "patterns"))
        return shared(name, ranks, lora_modules=tuple(adapters))

    return started


def forked() -> list[list[int]]:
    """Prompts that share beginnings, whole blocks of them and parts."""
    [first] = prompts([40], seed=2)
    return [*prompts([1, 16, 17, 100, 131]), first, [*first[:37], 5, 6, 7], [*first, 8, 9], first]


def bits(answers: Sequence[Answer]) -> list[object]:
    return [(answer.token_ids, answer.logprobs) for answer in answers]


def patiently(engine: Engine, prompt: Sequence[int]) -> Answer:
    """The answer; the threads that move blocks are let in between two steps."""
    answer = Answer()

    def ended() -> bool:
        for output in engine.step():
            answer.add(output)
        return not engine.busy

    submit(engine, 0, prompt, max_tokens=4)
    wait_until(ended, "the prompt is answered")
    return answer


@pytest.mark.parametrize(("name", "ranks"), SHARED)
def test_ranks_answer_like_transformers(name: str, ranks: int, adapted: Started) -> None:
    asked, engine = prompts([1, 7, 16, 40, 131]), adapted(name, ranks)
    cold = ask(engine, asked)
    for prompt, answer in zip(asked, cold, strict=True):
        assert_is_transformers(name, prompt, answer)
    warm = ask(engine, asked)
    assert bits(warm) == bits(cold)
    assert [answer.cached_tokens for answer in warm] == [len(prompt) - 1 for prompt in asked]


@pytest.mark.parametrize(("name", "ranks"), SHARED)
def test_ranks_give_the_log_probabilities_of_prompts(name: str, ranks: int, adapted: Started) -> None:
    [prompt] = prompts([70], seed=3)
    [answer] = ask(adapted(name, ranks), [prompt], prompt_logprobs=2)
    expected = logits(name, prompt)[:-1].log_softmax(-1)
    assert answer.prompt_logprobs is not None
    for token, row, found in zip(prompt[1:], expected, answer.prompt_logprobs, strict=True):
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [alternative for alternative, _ in found.top] == row.topk(2).indices.tolist()


def test_logits_of_a_long_prompt_are_computed_in_several_parts(
    adapted: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    [prompt], engine = prompts([50], seed=4), adapted("qwen3", 4)
    [whole] = ask(engine, [prompt], prompt_logprobs=1)
    monkeypatch.setattr("replica.runners.sampling.LOGITS_AT_ONCE", 320 * 7)
    [parts] = ask(engine, [prompt], prompt_logprobs=1)
    assert parts.prompt_logprobs == whole.prompt_logprobs
    assert bits([parts]) == bits([whole])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"max_num_batched_tokens": 23, "block_size": 7, "num_blocks": 30}, id="chunks, preemption"),
        pytest.param(
            {"max_num_batched_tokens": 300, "num_blocks": 128, "threads": 2}, id="threads", marks=pytest.mark.grid
        ),
    ],
)
def test_no_bit_depends_on_caching_chunks_batches_or_preemption(
    changes: dict[str, object], adapted: Started, shared: Started
) -> None:
    asked, plain, hard = forked(), adapted("llama-odd", 2), shared("llama-odd", 2, **changes)
    expected = [ask(plain, [prompt])[0] for prompt in asked]
    for _ in range(2):  # the second time warm
        assert bits(ask(hard, asked)) == bits(expected)
    assert bool(hard.scheduler.preemptions) == (changes["num_blocks"] == 30)


@pytest.mark.grid
def test_ranks_compute_in_bfloat16(shared: Started) -> None:
    [prompt] = prompts([45], seed=7)
    [answer] = ask(shared("llama-biased", 2, dtype="bfloat16"), [prompt])
    exact = logits("llama-biased", [*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :].log_softmax(-1)
    found = torch.tensor([logprobs.logprob for logprobs in answer.logprobs])
    error = (exact.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0] - found).abs()
    assert error.mean() < 0.1


def test_sampled_answers_are_continued_with_the_same_bits(adapted: Started) -> None:
    [prompt], engine = prompts([50], seed=5), adapted("qwen3", 4)
    sampling: dict[str, Any] = {
        "temperature": 0.9,
        "seed": 7,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "max_tokens": 20,
    }
    [whole] = ask(engine, [prompt], **sampling)
    engine.reset()
    submit(engine, 0, prompt, whole.token_ids[:13], **sampling)
    [rest] = finish(engine).values()
    assert (rest.token_ids, rest.logprobs) == (whole.token_ids[13:], whole.logprobs[13:])


def test_blocks_come_back_from_host_and_disk_also_after_a_restart(folder: Path, tmp_path: Path) -> None:
    tiers = {"num_blocks": 16, "host_blocks": 8, "disk_blocks": 64, "disk_kv": str(tmp_path), "tensor_parallel_size": 2}
    asked = prompts([100, 101, 102, 103], seed=6)
    with closing_engine(native(saved("qwen3", folder), **tiers)) as engine:
        expected = [patiently(engine, prompt) for prompt in asked]
        again = [patiently(engine, prompt) for prompt in asked]
        assert bits(again) == bits(expected)
        loaded = engine.scheduler.transfers.loaded_tokens
        assert loaded.get(HOST, 0) + loaded.get(DISK, 0)
    with closing_engine(native(saved("qwen3", folder), **tiers)) as engine:
        again = [patiently(engine, prompt) for prompt in asked]
        assert bits(again) == bits(expected)
        assert engine.scheduler.transfers.loaded_tokens.get(DISK)


def test_other_numbers_of_ranks_never_read_each_others_blocks(adapted: Started) -> None:
    engine = adapted("qwen3", 4)
    configs = [msgspec.structs.replace(engine.config, tensor_parallel_size=ranks) for ranks in (1, 2, 4)]
    assert len({kv_layout_of(config, engine.runner) for config in configs}) == len(configs)


@pytest.mark.parametrize(("name", "ranks"), [("llama-odd", 2), ("qwen3", 4)])
def test_ranks_compute_adapters_like_peft(name: str, ranks: int, adapted: Started) -> None:
    engine = adapted(name, ranks)
    asked = [(adapter, prompt) for adapter in ("all", None, "patterns") for prompt in prompts([17, 40])]
    for _ in range(2):  # the second time warm
        for number, (adapter, prompt) in enumerate(asked):
            submit(engine, number, prompt, lora_name=adapter)
        answers = finish(engine)
        for number, (adapter, prompt) in enumerate(asked):
            answer = answers[number]
            if adapter is None:
                assert_is_transformers(name, prompt, answer)
            else:
                said = adapted_logits(name, adapter, [*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :]
                assert said.argmax(-1).tolist() == answer.token_ids
    assert answers[0].cached_tokens
