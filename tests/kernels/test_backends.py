"""The first backend that works is taken, unless one is asked for by name."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import backends
from kernels.backends import Backend, choose
from kernels.cpu import CpuAttention
from kernels.paged import KvShape
from tests.kernels import flashes

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def order_with_broken(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend comes first that cannot be made."""

    def make(_shape: KvShape) -> CpuAttention:
        raise error

    monkeypatch.setitem(sys.modules, "kernels.broken", SimpleNamespace(make=make))
    monkeypatch.setattr(backends, "ORDER", (Backend("broken", "cpu", "kernels.broken:make"), *backends.ORDER))


def test_a_cpu_gets_the_cpu_path() -> None:
    choice = choose("auto", "cpu", KvShape(FLOAT32, 16, 64))
    assert choice.attention.name == "cpu" and choice.passed == {}


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("no library"), RuntimeError("no operator")])
def test_what_cannot_be_loaded_is_passed_and_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    order_with_broken(error, monkeypatch)
    choice = choose("auto", "cpu", KvShape(FLOAT32, 16, 64))
    assert choice.attention.name == "cpu" and choice.passed == {"broken": str(error)}
    with pytest.raises(ValueError, match=f"attention 'broken' cannot be used on cpu; broken: {error}"):
        choose("broken", "cpu", KvShape(FLOAT32, 16, 64))


@pytest.mark.parametrize(
    ("name", "device", "names"),
    [
        ("fast", "cpu", "auto, cpu"),
        ("triton", "cpu", "auto, cpu"),
        ("cpu", "cuda", "auto, flash3, flash3-vllm, triton, torch"),
    ],
)
def test_an_unknown_name_is_refused_with_those_there_are(name: str, device: str, names: str) -> None:
    with pytest.raises(ValueError, match=f"attention {name!r} cannot be used on {device}; use one of {names}$"):
        choose(name, device, KvShape(FLOAT32, 16, 64))


# ---- on a GPU: what is installed is made up, and so is the GPU


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper, with torch and nothing else."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in ("vllm_flash_attn", "vllm", "kernels.gpu.attention"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def operator() -> Iterator[None]:
    with flashes.operator():
        yield


def own_flash(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """The user has a `vllm_flash_attn`, of which this is `flash_attn_varlen_func`."""
    module = SimpleNamespace(flash_attn_varlen_func=function)
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", module)


def of_today(q: Any, k: Any, v: Any, *, seqused_k: Any) -> None: ...


def of_2024(q: Any, k: Any, v: Any, *, block_table: Any) -> None: ...


def vllm(folder: Path, monkeypatch: pytest.MonkeyPatch, library: str = "_vllm_fa3_C.abi3.so") -> Path:
    """A vllm is installed, which says so if it is imported."""
    monkeypatch.delitem(sys.modules, "vllm")
    (folder / "vllm/vllm_flash_attn").mkdir(parents=True)
    for module in ("vllm", "vllm/vllm_flash_attn"):
        (folder / module / "__init__.py").write_text("raise AssertionError('vllm was imported')")
    (folder / "vllm/vllm_flash_attn" / library).write_text("no library")
    monkeypatch.syspath_prepend(folder)
    return folder / "vllm/vllm_flash_attn" / library


def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Triton, or its user, is available."""
    module = SimpleNamespace(tried=lambda _shape: SimpleNamespace(name="triton"))
    monkeypatch.setitem(sys.modules, "kernels.gpu.attention", module)


@pytest.mark.usefixtures("operator")
def test_a_flash_attention_of_the_users_own_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own_flash(monkeypatch, of_today)
    choice = choose("auto", "cuda", KvShape(BFLOAT16, 16, 64))
    assert choice.attention.name == "flash3" and not choice.passed


def test_then_the_one_inside_vllm_of_which_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, loaded = vllm(tmp_path, monkeypatch), list[Path]()
    with flashes.operator():
        monkeypatch.setattr(torch.ops, "load_library", loaded.append)
        choice = choose("auto", "cuda", KvShape(BFLOAT16, 16, 64))
    assert choice.attention.name == "flash3" and choice.passed.keys() == {"flash3"}
    assert loaded == [path] and "vllm" not in sys.modules


def test_then_triton_and_at_last_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose("auto", "cuda", KvShape(BFLOAT16, 16, 64))
    passed = ["flash3", "flash3-vllm", "triton"]
    assert choice.attention.name == "torch" and list(choice.passed) == passed
    triton(monkeypatch)
    assert choose("auto", "cuda", KvShape(BFLOAT16, 16, 64)).attention.name == "triton"


@pytest.mark.usefixtures("operator")
def test_float32_goes_to_triton_whatever_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_flash(monkeypatch, of_today)
    vllm(tmp_path, monkeypatch)
    triton(monkeypatch)
    choice = choose("auto", "cuda", KvShape(FLOAT32, 256, 64))
    assert choice.attention.name == "triton"
    assert all("not torch.float32" in reason for reason in choice.passed.values())


def test_why_nothing_else_will_do_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_flash(monkeypatch, of_2024)
    vllm(tmp_path, monkeypatch)
    passed = choose("auto", "cuda", KvShape(BFLOAT16, 16, 64)).passed
    assert "takes no seqused_k" in passed["flash3"]
    assert "_vllm_fa3_C.abi3.so" in passed["flash3-vllm"]  # the loader's own words


def test_a_library_without_the_operator_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    own_flash(monkeypatch, of_today)
    assert "has no fwd" in choose("auto", "cuda", KvShape(BFLOAT16, 16, 64)).passed["flash3"]


def test_an_older_device_is_told_which_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ValueError, match=r"FlashAttention 3 needs compute capability 9\.x; this device has 8\.6"):
        choose("flash3", "cuda", KvShape(BFLOAT16, 16, 64))


@pytest.mark.parametrize(
    ("block_size", "head_dim", "reason"),
    [
        (64, 128, "wants a block size below 64, not 64"),
        (16, 20, "wants heads of a multiple of 8, up to 256, not of 20"),
        (16, 264, "wants heads of a multiple of 8, up to 256, not of 264"),
    ],
)
@pytest.mark.usefixtures("operator")
def test_flash_attention_is_passed_for_kv_that_it_cannot_read(
    block_size: int, head_dim: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_flash(monkeypatch, of_today)
    triton(monkeypatch)
    choice = choose("auto", "cuda", KvShape(BFLOAT16, block_size, head_dim))
    assert choice.attention.name == "triton" and reason in choice.passed["flash3"]
