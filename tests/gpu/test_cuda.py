"""GPU-only code calls torch correctly; torch's side is faked."""

import time
from types import SimpleNamespace

import pytest
import torch

from kernels.paged import KvShape
from tests.gpu import run as script
from tests.gpu.place import Place, chosen, unusable

PLACE = Place(torch.device("cuda"), quick=True, until_s=time.monotonic() + 1000)


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stands_in in {
        "is_available": lambda: True,
        "get_device_capability": lambda: (9, 0),
        "get_device_properties": lambda _: SimpleNamespace(name="Pretended", total_memory=80 * 2**30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)


def test_all_kinds_of_attention_are_tried_and_why_some_do_not_work_is_kept() -> None:
    passed = unusable(PLACE, KvShape(torch.float32, 16, 64))
    assert "torch" not in passed
    assert passed.keys() >= {"flash3", "flash3-vllm"} and "computes" in passed["flash3"]
    assert chosen(PLACE, KvShape(torch.float32, 16, 64)).attention.name in ("triton", "torch")


def test_what_it_runs_on_is_described() -> None:
    found = script.described("cuda")
    assert found["device"] == "Pretended, 80 GiB" and found["torch"] == torch.__version__
    assert found["attention"].startswith(("triton", "torch")) and "not flash3: " in found["attention"]
    assert found["driver"]
