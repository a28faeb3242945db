"""The native engine computes adapters as peft does, whatever stands beside in a batch or in the cache."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from replica.cache.chain import Chain
from replica.cache.moves import Pull
from replica.config import LoraModule
from replica.engine.engine import Engine
from replica.neighbours.messages import encode
from replica.neighbours.reader import read_of
from replica.neighbours.source import chain_of
from tests.events.processes import wait_until
from tests.replica.device.hosts import HostAccelerator, on_device
from tests.replica.lora.adapters import ADAPTERS, adapted_logits, saved_adapter
from tests.replica.models import VOCABULARY, Answer, finish, native, saved, submit
from tests.replica.neighbours.replicas import neighbour_config

MODEL = "qwen3"
Asked = Sequence[tuple[str | None, list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def engine_with(folder: Path, *names: str, model: str = MODEL, **changes: Any) -> Engine:
    """An engine that has these adapters, each under its own name."""
    modules = tuple(LoraModule(name, str(saved_adapter(model, name, folder))) for name in names)
    return native(saved(model, folder), lora_modules=modules, **changes)


def prompt(length: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(length)]


def answers(engine: Engine, asked: Asked, **sampling: Any) -> list[Answer]:
    """All of these at once."""
    for number, (name, tokens) in enumerate(asked):
        submit(engine, number, tokens, lora_name=name, **sampling)
    found = [Answer() for _ in asked]
    while engine.busy:  # also with blocks that come from the host's memory
        for output in engine.step():
            found[output.id].add(output)
    engine.check()
    return found


def assert_is_peft(model: str, name: str, tokens: Sequence[int], answer: Answer) -> None:
    said = adapted_logits(model, name, [*tokens, *answer.token_ids[:-1]])[len(tokens) - 1 :]
    assert said.argmax(-1).tolist() == answer.token_ids
    expected = said.log_softmax(-1)
    for token, row, found in zip(answer.token_ids, expected, answer.logprobs, strict=True):
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-4)


@pytest.mark.parametrize("model", ["qwen3", pytest.param("llama-biased", marks=pytest.mark.grid), "llama-odd"])
def test_every_kind_of_adapter_is_computed_as_by_peft(model: str, folder: Path) -> None:
    engine = engine_with(folder, *ADAPTERS, model=model)
    asked = [(name, prompt(length, length)) for name in ADAPTERS for length in (1, 40)]
    for (name, tokens), answer in zip(asked, answers(engine, asked), strict=True):
        assert_is_peft(model, name, tokens, answer)


def mixed() -> list[tuple[str | None, list[int]]]:
    """Prompts that share beginnings and differ in their adapters, and the other way round."""
    shared = prompt(40)
    names = (None, "all", "attention", "rslora")
    return [(name, [*shared[:length], *prompt(extra, extra)]) for name in names for length, extra in ((40, 1), (37, 9))]


HARD: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 23, "block_size": 7, "num_blocks": 40},
    {"max_num_batched_tokens": 64, "host_blocks": 64, "num_blocks": 20},
]


@pytest.mark.parametrize("changes", [pytest.param(HARD[0], marks=pytest.mark.grid), HARD[1]], ids=str)
def test_no_bit_depends_on_batches_chunks_preemption_or_the_cache(changes: dict[str, Any], folder: Path) -> None:
    names = "all", "attention", "rslora"
    asked = mixed()
    alone = engine_with(folder, *names, enable_prefix_caching=False, max_num_seqs=1)
    expected = answers(alone, asked)
    engine = engine_with(folder, *names, **changes)
    for _ in range(2):  # the second time warm
        for of_alone, answer in zip(expected, answers(engine, asked), strict=True):
            assert (answer.token_ids, answer.logprobs) == (of_alone.token_ids, of_alone.logprobs)
    assert answers(engine, asked[-1:])[0].cached_tokens


@pytest.mark.parametrize("graphs", [True, pytest.param(False, marks=pytest.mark.grid)], ids=["graphs", "no graphs"])
def test_the_runner_of_a_device_says_the_same(graphs: bool, folder: Path) -> None:
    names = "all", "attention", "rslora"
    modules = tuple(LoraModule(name, str(saved_adapter(MODEL, name, folder))) for name in names)
    accelerator = HostAccelerator()
    device = on_device(saved(MODEL, folder), accelerator, lora_modules=modules, graphs=graphs)
    asked, replays = mixed(), accelerator.replays
    expected = answers(engine_with(folder, *names), asked)
    for _ in range(2):
        found = answers(device, asked)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert (accelerator.replays > replays) == graphs


@pytest.mark.parametrize(("name", "in_graphs"), [("all", True), ("wide", False)])
def test_steps_with_adapters_are_in_graphs_but_for_very_wide_ones(name: str, in_graphs: bool, folder: Path) -> None:
    modules = (LoraModule(name, str(saved_adapter(MODEL, name, folder))),)
    accelerator = HostAccelerator()
    device = on_device(saved(MODEL, folder), accelerator, lora_modules=modules)
    asked, plain, replays = [(name, prompt(9)), (name, prompt(40))], [(None, prompt(5))], accelerator.replays
    (expected, found) = (answers(engine, asked) for engine in (engine_with(folder, name), device))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    steps = len(expected[0].token_ids)
    assert accelerator.replays - replays == (steps if in_graphs else 0)
    answers(device, plain)
    assert accelerator.replays - replays >= len(plain)


def test_prompt_logprobs_are_those_of_the_adapter(folder: Path) -> None:
    engine, tokens = engine_with(folder, "all"), prompt(30)
    (answer,) = answers(engine, [("all", tokens)], prompt_logprobs=1, max_tokens=1)
    expected = adapted_logits(MODEL, "all", tokens).log_softmax(-1)
    assert answer.prompt_logprobs is not None
    for row, token, found in zip(expected, tokens[1:], answer.prompt_logprobs, strict=False):
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-4)


def test_an_answer_goes_on_where_another_replica_stopped(folder: Path) -> None:
    tokens = prompt(30)
    (whole,) = answers(engine_with(folder, "all"), [("all", tokens)])
    engine = engine_with(folder, "all")
    submit(engine, 1, tokens, output=whole.token_ids[:5], lora_name="all")
    assert finish(engine)[1].token_ids == whole.token_ids[5:]


# ---- caches


def resident(engine: Engine, known: set[object]) -> set[object]:
    """The blocks that a router knows after these events, of all media."""
    for event in engine.take_events():
        if isinstance(event, BlockStored):
            known |= {(event.medium, key) for key in event.block_hashes}
        elif isinstance(event, BlockRemoved):
            known -= {(event.medium, key) for key in event.block_hashes}
        else:
            assert not isinstance(event, AllBlocksCleared)
    return known


def is_written(engine: Engine) -> bool:
    engine.settle()
    return engine.pool.lower is not None and not engine.pool.lower.writing


def test_blocks_on_a_disk_are_those_of_the_files_not_of_the_name(folder: Path, tmp_path: Path) -> None:
    tokens = prompt(67)

    def first_answer(adapter: str) -> tuple[int, int]:
        """The blocks that are announced at the start, and the cached tokens of a first answer."""
        modules = (LoraModule("a", str(saved_adapter(MODEL, adapter, folder))),)
        disk: dict[str, Any] = {
            "disk_kv": str(tmp_path),
            "disk_blocks": 64,
            "host_blocks": 32,
            "events": "tcp://127.0.0.1:0",
        }
        engine = native(saved(MODEL, folder), lora_modules=modules, **disk)
        assert engine.mover is not None
        announced = len(resident(engine, set()))
        try:
            (answer,) = answers(engine, [("a", tokens)])
            assert_is_peft(MODEL, adapter, tokens, answer)
            wait_until(partial(is_written, engine), "all is written")
            return announced, answer.cached_tokens
        finally:
            engine.mover.close()

    assert first_answer("all") == (0, 0)
    announced, cached = first_answer("all")
    assert (announced > 0, cached) == (True, 64)
    assert first_answer("attention") == (0, 0)


def test_a_neighbour_is_asked_for_blocks_of_the_same_files() -> None:
    """One with another adapter of this name would otherwise give its own."""
    chain = Chain(prompt(40), 16, MODEL, lora_name="a", lora_digest="0" * 32)
    read = read_of(Pull("", chain, 0, range(2), 1.0), neighbour_config(), 1.0)
    assert chain_of(msgspec.msgpack.decode(encode(read), type=type(read)), 16).exact == chain.exact
    other = Chain(prompt(40), 16, MODEL, lora_name="a", lora_digest="1" * 32)
    assert (other.keys, other.exact) != (chain.keys, chain.exact)
    assert other.keys == chain.keys, "outside only the name is known"
