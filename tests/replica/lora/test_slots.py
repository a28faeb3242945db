"""Adapters have slots of tables, which kernels and graphs read."""

from pathlib import Path

import torch

from replica.config import LoraModule
from replica.lora.adapter import Place
from replica.lora.slots import ANY, NONE, Slots
from tests.replica.lora.adapters import saved_adapter
from tests.replica.models import native, saved

MODEL = "llama"


def test_each_adapter_has_a_slot(tmp_path: Path) -> None:
    modules = tuple(LoraModule(name, str(saved_adapter(MODEL, name, tmp_path))) for name in ("all", "attention"))
    adapters = native(saved(MODEL, tmp_path), lora_modules=modules).runner.adapters
    assert adapters is not None
    slots = Slots(adapters, torch.device("cpu"))
    assert [slots.numbers[name] for name in ("attention", ANY, "all")] == [2, NONE, 1]
    changes = [adapters.loaded[name].changes.get((0, Place.QKV)) for name in ("all", "attention")]
    table = slots.tables[0, Place.QKV]
    assert [table.change(slot) for slot in range(3)] == [None, *changes]
