"""Triton's attention equals the reference, whatever the shapes, and reads nothing that was never written."""

import pytest

pytest.importorskip("triton", reason="there is no Triton here: see `make triton-check`")

import torch

from kernels.gpu.attention import TritonAttention, tried
from tests.kernels.gpu.device import DEVICE, HALF, INTERPRETED, needs_device
from tests.kernels.sequences import Shape
from tests.kernels.tables import both

pytestmark = needs_device

SHAPES = (
    Shape(heads=4, kv_heads=2, head_dim=16, block_size=4),
    Shape(heads=6, kv_heads=3, head_dim=20, block_size=7),
    Shape(heads=7, kv_heads=1, head_dim=80, block_size=32),
    Shape(heads=8, kv_heads=1, head_dim=64, block_size=16),
    Shape(heads=2, kv_heads=2, head_dim=128, block_size=1),
    Shape(heads=8, kv_heads=2, head_dim=96, block_size=512),
    Shape(heads=20, kv_heads=1, head_dim=32, block_size=128),
)
TOLERANCES = {torch.float32: 4e-6, HALF: 4e-3 if INTERPRETED else 2e-2}
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
FEW, MANY = 1, 64  # processors of a device: with many of them a sequence that decodes is cut


def check(shape: Shape, spans: list[tuple[int, int]], decoding: int, dtype: torch.dtype, processors: int = FEW) -> None:
    mine, expected = both(TritonAttention(processors), shape, spans, decoding, dtype, DEVICE)
    torch.testing.assert_close(mine, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@shapes
@dtypes
@pytest.mark.parametrize("processors", [FEW, MANY])
def test_a_mixed_batch_equals_the_reference(shape: Shape, dtype: torch.dtype, processors: int) -> None:
    check(shape, [(40, 1), (1, 1), (133, 1), (70, 20), (33, 33), (9, 1)], 3, dtype, processors)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("processors", [FEW, MANY])
def test_sequences_that_end_at_the_edges_of_tiles_and_splits(
    head_dim: int, dtype: torch.dtype, processors: int
) -> None:
    lengths = [16, 17, 63, 64, 65, 127, 128, 129, 257]
    check(Shape(2, 1, head_dim, 16), [(length, 1) for length in lengths], len(lengths), dtype, processors)


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1)])
def test_long_prompts_go_through_several_tiles(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    spans = [(150, 150), (300, 129), (65, 64), (64, 64), (200, 3)]
    check(Shape(heads, kv_heads, 64, 16), spans, 0, dtype)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 64, 65])
def test_chunks_of_any_length(tokens: int) -> None:
    check(Shape(2, 2, 32, 8), [(tokens, tokens), (tokens + 50, tokens)], 0, HALF)


@pytest.mark.parametrize("processors", [FEW, MANY])
@pytest.mark.parametrize("nobody", range(4))
def test_rows_of_a_sequence_without_tokens_come_out_finite(nobody: int, processors: int) -> None:
    spans = [(9, 1), (7, 1), (30, 4), (11, 5)]
    attention, off = TritonAttention(processors), {nobody: -spans[nobody][0]}
    mine, expected = both(attention, Shape(), spans, 2, device=DEVICE, lengths_off=off)
    begin = sum(count for _, count in spans[:nobody])
    end = begin + spans[nobody][1]
    assert mine[begin:end].isfinite().all()
    mine[begin:end] = expected[begin:end]
    torch.testing.assert_close(mine, expected, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("decoding", [0, 2])
def test_the_rows_of_either_kind_alone(decoding: int) -> None:
    check(Shape(), [(40, 1), (13, 1)] if decoding else [(40, 7), (13, 13)], decoding, torch.float32)


@pytest.mark.parametrize("block_size", [1, 16, 4096])
@dtypes
def test_it_is_tried_before_it_is_taken(block_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert tried(dtype, block_size, DEVICE).name == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(RuntimeError, match=r"need compute capability 8\.0; this device has 7\.5"):
        tried(dtype, block_size, DEVICE)
