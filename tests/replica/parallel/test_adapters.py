"""Adapters that are loaded while several ranks run: all of them have the same ones, or none has."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from replica.engine.engine import Engine
from replica.lora.adapter import Adapter
from replica.messages import AdapterChanged, LoadAdapter, encode
from tests.events.processes import DEADLINE_S, wait_until
from tests.replica.device.hosts import on_devices
from tests.replica.lora.adapters import adapted_logits, saved_adapter
from tests.replica.lora.loading import load, shelf_of, unload
from tests.replica.models import ask, native, saved
from tests.replica.parallel.conftest import closing_engine, followers_of

MODEL = "llama"
PROMPT = [1, 2, 3] * 11
OPTIONS = {"loads_adapters": True, "max_loras": 2, "max_num_batched_tokens": 64, "max_num_seqs": 6}


@pytest.fixture(scope="module", params=["cpu", pytest.param("devices", marks=pytest.mark.grid)])
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


def test_the_engine_does_not_wait_for_a_rank_that_reads(
    two: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, is_read, adapters = saved_adapter(MODEL, "all", folder), threading.Event(), two.runner.adapters
    assert adapters is not None
    read = adapters.read

    def then_say_so(name: str, folder: Path) -> Adapter:
        try:
            return read(name, folder)
        finally:
            is_read.set()

    monkeypatch.setattr(adapters, "read", then_say_so)
    followers = followers_of(os.getpid())
    for pid in followers:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert shelf_of(two).load(LoadAdapter(1, "a", str(path))) is None
        assert is_read.wait(DEADLINE_S)
        assert not any(two.settle_adapters() for _ in range(1000))
    finally:
        for pid in followers:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: two.settle_adapters() == [AdapterChanged(1)], "all have read it")
    assert_is_peft(two, "a", "all")
    unload(two, "a")


def test_files_whose_names_are_no_text_end_no_rank(two: Engine, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 8}')
    os.close(os.open(os.fsencode(tmp_path) + b"/adapter_model.\xff.bin", os.O_CREAT))
    failure = load(two, "a", tmp_path)
    assert "convert it to safetensors" in failure and encode(AdapterChanged(1, failure))
    assert load(two, "a", saved_adapter(MODEL, "all", folder)) == ""
    assert_is_peft(two, "a", "all")
    unload(two, "a")
