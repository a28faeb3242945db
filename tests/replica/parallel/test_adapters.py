"""Adapters that are loaded while several ranks run: all of them have the same ones, or none has."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from replica.engine import Engine
from tests.replica.device.hosts import on_devices
from tests.replica.lora.adapters import adapted_logits, saved_adapter
from tests.replica.lora.loading import load, shelf_of, unload
from tests.replica.models import ask, native, saved
from tests.replica.parallel.conftest import closing_engine

MODEL = "llama"
PROMPT = [1, 2, 3] * 11
OPTIONS = {"loads_adapters": True, "max_loras": 2, "max_num_batched_tokens": 64, "max_num_seqs": 6}


@pytest.fixture(scope="module", params=["cpu", "devices"])
def two(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    model = saved(MODEL, folder)
    if request.param == "cpu":
        started = native(model, tensor_parallel_size=2, **OPTIONS)
    else:
        started = on_devices(model, 2, **OPTIONS)
    with closing_engine(started) as engine:
        yield engine
        shelf_of(engine).close()


def assert_is_peft(engine: Engine, name: str, adapter: str) -> None:
    [answer] = ask(engine, [PROMPT], lora_name=name)
    said = adapted_logits(MODEL, adapter, [*PROMPT, *answer.token_ids[:-1]])[len(PROMPT) - 1 :]
    assert said.argmax(-1).tolist() == answer.token_ids


def test_all_ranks_have_what_is_loaded_and_lose_what_is_unloaded(two: Engine, folder: Path) -> None:
    for adapter in ("all", "patterns", "rslora"):
        assert load(two, "a", saved_adapter(MODEL, adapter, folder)) == ""
        assert_is_peft(two, "a", adapter)
        assert unload(two, "a") == ""
    for name in "bc":
        assert load(two, name, saved_adapter(MODEL, "all", folder)) == ""
    assert "--max-loras" in load(two, "d", saved_adapter(MODEL, "all", folder))
    for name in "bc":
        assert_is_peft(two, name, "all")
        unload(two, name)


@pytest.mark.parametrize(
    ("others", "said"), [("elsewhere", "no adapter_config.json"), (f"{MODEL} patterns", "changed while they were read")]
)
def test_what_one_rank_cannot_have_none_has(
    two: Engine, folder: Path, others: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others read something else than the engine: a disk of their own, or files that are being written."""
    saved_adapter(MODEL, "patterns", folder)
    adapters = two.runner.adapters
    assert adapters is not None and adapters.others is not None
    read = adapters.others.read
    with monkeypatch.context() as patch:
        patch.setattr(adapters.others, "read", lambda name, _: read(name, folder / others))
        assert said in load(two, "a", saved_adapter(MODEL, "all", folder))
    assert not shelf_of(two).digests
    assert load(two, "a", saved_adapter(MODEL, "all", folder)) == ""
    assert_is_peft(two, "a", "all")
    unload(two, "a")


def test_what_the_engine_cannot_read_others_forget(two: Engine, folder: Path) -> None:
    assert "no adapter_config.json" in load(two, "a", folder)
    assert load(two, "a", saved_adapter(MODEL, "all", folder)) == ""
    assert_is_peft(two, "a", "all")
    unload(two, "a")
