"""Adapters come into slots of tables, and leave them for others once they are unloaded."""

from pathlib import Path

import pytest
import torch

from replica.config import LoraModule
from replica.engine.engine import Engine
from replica.lora.adapter import Place
from replica.lora.slots import ANY, NONE, Slots
from replica.messages import LoadAdapter, UnloadAdapter
from tests.events.processes import wait_until
from tests.replica.device.hosts import HostAccelerator, on_device
from tests.replica.lora.adapters import saved_adapter
from tests.replica.models import Answer, finish, native, saved, submit

MODEL = "llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def engine_with(folder: Path, accelerator: HostAccelerator | None, *names: str, most: int) -> Engine:
    """On a device, or as a CPU computes."""
    modules = tuple(LoraModule(name, str(saved_adapter(MODEL, name, folder))) for name in names)
    options = {"lora_modules": modules, "max_loras": most, "loads_adapters": True}
    return (
        on_device(saved(MODEL, folder), accelerator, **options)
        if accelerator
        else native(saved(MODEL, folder), **options)
    )


def answers(engine: Engine, *names: str | None) -> list[Answer]:
    for number, name in enumerate(names):
        submit(engine, number, [number + 1, 2, 3, 4, 5], lora_name=name)
    found = finish(engine)
    return [found[number] for number in range(len(names))]


def change(engine: Engine, load: str, unload: str, folder: Path) -> None:
    assert engine.shelf is not None
    assert not engine.shelf.unload(UnloadAdapter(1, unload)).error
    engine.settle_adapters()
    assert engine.shelf.load(LoadAdapter(2, load, str(saved_adapter(MODEL, load, folder)))) is None

    wait_until(lambda: bool(engine.settle_adapters()), "the adapter is loaded")


def test_a_slot_is_kept_while_its_adapter_is_loaded(folder: Path) -> None:
    adapters = engine_with(folder, None, "all", "attention", most=2).runner.adapters
    assert adapters is not None
    slots = Slots(adapters, 2, torch.device("cpu"))
    assert [slots.of(name) for name in ("attention", ANY, "all", "attention")] == [1, NONE, 2, 1]
    changes = [adapters.loaded[name].changes.get((0, Place.QKV)) for name in ("attention", "all")]
    table = slots.tables[0, Place.QKV]
    assert [table.change(slot) for slot in range(3)] == [None, *changes]
    adapters.loaded["rslora"] = adapters.loaded.pop("attention")
    assert slots.of("rslora") == 1  # the same one under another name
    adapters.loaded["other"] = adapters.read("other", saved_adapter(MODEL, "attention", folder))
    del adapters.loaded["rslora"]
    assert [slots.of("other"), slots.of("all")] == [1, 2]


def test_graphs_compute_with_an_adapter_that_took_anothers_slot(folder: Path) -> None:
    accelerator = HostAccelerator()
    device, plain = (engine_with(folder, one, "all", "attention", most=2) for one in (accelerator, None))
    for names in (("all", "attention", None), ("all", "rslora", "rslora")):
        if "rslora" in names:
            for engine in (device, plain):
                change(engine, "rslora", "attention", folder)
        replays = accelerator.replays
        for found, expected in zip(answers(device, *names), answers(plain, *names), strict=True):
            assert found.token_ids == expected.token_ids
        assert accelerator.replays > replays
