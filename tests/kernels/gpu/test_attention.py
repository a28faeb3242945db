"""Triton's attention equals the reference for all shapes, and reads no unwritten memory."""

import pytest

pytest.importorskip("triton", reason="there is no Triton here: see `make triton-check`")

import torch

from kernels.backends import ORDER, choose
from kernels.gpu import attention
from kernels.gpu.attention import Gpu, TritonAttention, tried
from kernels.paged import KvShape
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
# `make triton-check` tries the smallest ones; with CASES= all.
rest = pytest.mark.grid
shapes = pytest.mark.parametrize(
    "shape", [*SHAPES[:2], *(pytest.param(shape, marks=rest) for shape in SHAPES[2:])], ids=str
)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
FEW, MANY = 1, 16  # processors of a device: with many of them few sequences are cut
# The interpreter takes seconds for a case: there each dtype is tried with one number of processors.
PAIRS = [(torch.float32, FEW), (HALF, MANY), *([] if INTERPRETED else [(torch.float32, MANY), (HALF, FEW)])]
pairs = pytest.mark.parametrize(("dtype", "processors"), PAIRS, ids=str)
# What takes longest is tried there with one of them for each shape.
GRAPHS = [
    (shape, *pair)
    for number, shape in enumerate(SHAPES[:3])
    for pair in (PAIRS[number % 2 : number % 2 + 1] if INTERPRETED else PAIRS)
]
LONG_PROMPTS = [((1, 1), torch.float32), ((7, 1), HALF)]
LONG_PROMPTS += [] if INTERPRETED else [((1, 1), HALF), ((7, 1), torch.float32)]


def attention_for(processors: int) -> TritonAttention:
    return TritonAttention(Gpu(processors, shared=0))


def check(shape: Shape, spans: list[tuple[int, int]], decoding: int, dtype: torch.dtype, processors: int = FEW) -> None:
    mine, expected = both(attention_for(processors), shape, spans, decoding, dtype, DEVICE)
    torch.testing.assert_close(mine, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@shapes
@pairs
def test_a_mixed_batch_equals_the_reference(shape: Shape, dtype: torch.dtype, processors: int) -> None:
    check(shape, [(40, 1), (1, 1), (133, 1), (70, 20), (33, 33), (9, 1)], 3, dtype, processors)


@pytest.mark.parametrize(
    ("shape", "dtype", "processors"), [GRAPHS[0], *(pytest.param(*case, marks=rest) for case in GRAPHS[1:])], ids=str
)
def test_so_does_one_in_a_graph(shape: Shape, dtype: torch.dtype, processors: int) -> None:
    spans = [(40, 1), (1, 1), (133, 1), (70, 20), (33, 33), (600, 2)]
    mine, expected = both(attention_for(processors), shape, spans, 3, dtype, DEVICE, more=(5, 3))
    torch.testing.assert_close(mine, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    "spans",
    [[(9, 1)], [(40, 7)], *(pytest.param(one, marks=rest) for one in ([(9, 1), (1, 1), (30, 1)], [(3, 3), (700, 17)]))],
    ids=str,
)
@pytest.mark.parametrize("more", [(0, 0), (3, 0), (0, 3), pytest.param((40, 20), marks=rest)], ids=str)
def test_all_blocks_may_be_of_one_kind_and_mostly_free(spans: list[tuple[int, int]], more: tuple[int, int]) -> None:
    decoding = sum(rows == 1 for _, rows in spans)
    mine, expected = both(attention_for(MANY), Shape(), spans, decoding, device=DEVICE, more=more)
    torch.testing.assert_close(mine, expected, atol=4e-6, rtol=4e-6)


@dtypes
@pytest.mark.parametrize(
    ("cached", "rows"), [(511, 1), (511, 2), *(pytest.param(*one, marks=rest) for one in ((600, 33), (1500, 7)))]
)
def test_what_few_rows_have_before_them_is_cut(cached: int, rows: int, dtype: torch.dtype) -> None:
    check(Shape(2, 1, 32, 16), [(cached + rows, rows), (40 + rows, rows)], 0, dtype, MANY)


@pairs
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=rest)])
def test_sequences_that_end_at_the_edges_of_tiles_and_splits(
    head_dim: int, dtype: torch.dtype, processors: int
) -> None:
    lengths = [16, 17, 63, 64, 65, 127, 128, 129, 257]
    check(Shape(2, 1, head_dim, 16), [(length, 1) for length in lengths], len(lengths), dtype, processors)


@pytest.mark.parametrize(
    ("lengths", "more"),
    [
        ([9, 1, 700, 30], None),
        ([9, 1, 700, 30], (3, 2)),
        ([700, 9], None),
        ([5] * 40 + [300], (3, 2)),
        pytest.param([1] * 270 + [200], None, id="270 short ones"),
    ],
    ids=str,
)
def test_a_long_sequence_among_short_ones_is_cut(lengths: list[int], more: tuple[int, int] | None) -> None:
    shape, spans = Shape(4, 1, 16, 16), [(length, 1) for length in lengths]
    mine, expected = both(attention_for(MANY), shape, spans, len(spans), device=DEVICE, more=more)
    torch.testing.assert_close(mine, expected, atol=4e-6, rtol=4e-6)


@rest
@pytest.mark.parametrize(("all_heads", "dtype"), LONG_PROMPTS, ids=str)
def test_long_prompts_go_through_several_tiles(all_heads: tuple[int, int], dtype: torch.dtype) -> None:
    spans = [(150, 150), (300, 129), (65, 64), (64, 64), (200, 3)]
    check(Shape(*all_heads, 64, 16), spans, 0, dtype)


def test_tiles_find_their_sequences_among_many() -> None:
    spans = [(1 + 5 * number % 23, 1 + 5 * number % 23) for number in range(40)]
    check(Shape(3, 1, 16, 4), spans, 0, torch.float32)


@pytest.mark.parametrize("tokens", [1, 17, 64, *(pytest.param(one, marks=rest) for one in (2, 15, 16, 65))])
def test_chunks_of_any_length(tokens: int) -> None:
    check(Shape(2, 2, 32, 8), [(tokens, tokens), (tokens + 50, tokens)], 0, HALF)


@pytest.mark.parametrize("processors", [FEW, MANY])
@pytest.mark.parametrize("nobody", [0, *(pytest.param(one, marks=rest) for one in (1, 2, 3))])
def test_rows_of_a_sequence_without_tokens_come_out_finite(nobody: int, processors: int) -> None:
    spans = [(9, 1), (7, 1), (30, 4), (11, 5)]
    off = {nobody: -spans[nobody][0]}
    mine, expected = both(attention_for(processors), Shape(), spans, 2, device=DEVICE, lengths_off=off)
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
    monkeypatch.setattr(attention, "this_gpu", lambda: Gpu(1, 0))
    assert tried(KvShape(dtype, block_size, 64), DEVICE).name == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(RuntimeError, match=r"need compute capability 8\.0; this device has 7\.5"):
        tried(KvShape(dtype, block_size, 64), DEVICE)


@pytest.mark.skipif(DEVICE == "cpu", reason="attention of other projects takes a GPU")
@pytest.mark.parametrize("backend", [one.name for one in ORDER if one.device == "cuda" and one.name != "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [Shape(8, 2, 64, 16), Shape(14, 2, 80, 32), Shape(8, 8, 128, 16)], ids=str)
@pytest.mark.parametrize("spans", [[(40, 1), (1, 1), (2049, 1)], [(40, 1), (1025, 1), (70, 20), (33, 33), (600, 129)]])
def test_attention_of_other_projects_equals_the_reference(
    spans: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, backend: str
) -> None:
    try:
        chosen = choose(backend, "cuda", KvShape(dtype, shape.block_size, shape.head_dim)).attention
    except ValueError as error:
        pytest.skip(str(error))
    mine, expected = both(chosen, shape, spans, sum(rows == 1 for _, rows in spans), dtype, DEVICE)
    torch.testing.assert_close(mine, expected, atol=2e-2, rtol=2e-2)
