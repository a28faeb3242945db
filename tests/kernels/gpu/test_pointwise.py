"""Triton's fused operations equal torch's, step by step."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no Triton here: see `make triton-check`")

import torch
from torch import Tensor

from kernels.gpu.pointwise import TritonPointwise, evenly_spaced
from kernels.paged import LayerCache
from kernels.pointwise import Heads, Pointwise
from kernels.spans import Copy
from tests.kernels.gpu.device import DEVICE, needs_device

pytestmark = needs_device

TRITON, TORCH = TritonPointwise(), Pointwise()
TOLERANCES = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
COPIES = (Copy(0, 1, 5), Copy(2, 3, 1), Copy(4, 0, 3), Copy(5, 2, 4))  # 0 and 2 are overwritten after they were read


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*size, device=DEVICE).to(dtype)


def assert_equal(mine: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(mine, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 72), (3, 1500)])
@pytest.mark.parametrize("residual", [False, True])
def test_add_norm(dtype: torch.dtype, rows: int, width: int, residual: bool) -> None:
    given, delta = random(dtype, rows, width), random(dtype, rows, width) if residual else None
    weight = random(dtype, width)
    expected = TORCH.add_norm(given.clone(), delta, weight, 1e-5)
    for mine, one in zip(TRITON.add_norm(given, delta, weight, 1e-5), expected, strict=True):
        assert_equal(mine, one)


@dtypes
@pytest.mark.parametrize("width", [12, 1100])
def test_swiglu(dtype: torch.dtype, width: int) -> None:
    gate_up = random(dtype, 3, 2 * width) * 4
    assert_equal(TRITON.swiglu(gate_up), TORCH.swiglu(gate_up.clone()))


@dtypes
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("queries", "keys", "head_dim"), [(14, 2, 20), (4, 4, 64), (16, 8, 128), (9, 9, 16)])
def test_turn_and_store(dtype: torch.dtype, queries: int, keys: int, head_dim: int, normed: bool) -> None:
    norms = (random(dtype, head_dim), random(dtype, head_dim)) if normed else None
    heads = Heads(queries, keys, head_dim, norms)
    qkv, turn = random(dtype, 6, (queries + 2 * keys) * head_dim), random(dtype, 6, 2, 1, head_dim // 2)
    there = step(torch.tensor([3, 8, 17, 0, 21, 9], device=DEVICE))
    mine, expected = empty(dtype, keys, head_dim), empty(dtype, keys, head_dim)
    turned = TORCH.turn_and_store(qkv.clone(), heads, turn, expected, there)
    assert_equal(TRITON.turn_and_store(qkv, heads, turn, mine, there), turned)
    for one, other in zip(mine, expected, strict=True):
        assert_equal(one, other)


@dtypes
@pytest.mark.parametrize("size", [(3, 2, 6, 5, 2, 16), (1, 2, 6, 5, 3, 20), (2, 2, 6, 40, 2, 24)], ids=str)
def test_copies_of_all_layers(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    together = random(dtype, *size)
    expected = [LayerCache(*layer.clone()) for layer in together]
    caches = [LayerCache(*layer) for layer in together]
    TRITON.copy(caches, COPIES)
    TORCH.copy(expected, COPIES)
    for mine, one in zip(caches, expected, strict=True):
        assert torch.equal(mine.keys, one.keys) and torch.equal(mine.values, one.values)


def test_layers_that_lie_anywhere_are_copied_too() -> None:
    caches = [LayerCache(random(torch.float32, 6, 5, 2, 16), random(torch.float32, 6, 5, 2, 16)) for _ in range(4)]
    expected = [LayerCache(cache.keys.clone(), cache.values.clone()) for cache in caches]
    caches = [caches[number] for number in (2, 0, 3, 1)]
    TRITON.copy(caches, COPIES)
    TORCH.copy(expected, COPIES)
    for mine, one in zip(caches, (expected[number] for number in (2, 0, 3, 1)), strict=True):
        assert torch.equal(mine.keys, one.keys) and torch.equal(mine.values, one.values)


def test_layers_of_one_allocation_are_evenly_spaced() -> None:
    memory = torch.zeros(4, 2, 6, 5, 2, 16)
    caches = [LayerCache(*layer) for layer in memory]
    assert [(count, stride) for _, count, stride in evenly_spaced(caches)] == [(4, memory.stride(0))]
    assert [count for _, count, _ in evenly_spaced([caches[0], caches[1], caches[3]])] == [1, 1, 1]


def empty(dtype: torch.dtype, heads: int, head_dim: int) -> LayerCache:
    """Five blocks of five, in which nothing was stored."""
    return LayerCache(*torch.full((2, 5, 5, heads, head_dim), torch.nan, dtype=dtype, device=DEVICE))


def step(slots: Tensor) -> Any:
    return SimpleNamespace(slots=slots)
