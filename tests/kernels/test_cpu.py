"""Attention on a CPU equals the reference; in float32 it is the same to the last bit however it is cut into steps."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.contexts import ContextStep
from kernels.cpu import PARTITION, CpuAttention
from kernels.paged import LayerCache
from kernels.pointwise import Pointwise
from kernels.spans import Copy
from tests.kernels.reference import ReferenceAttention
from tests.kernels.sequences import Sequence, Shape, computed, memory, run, sequences

CPU, REFERENCE = CpuAttention(), ReferenceAttention()
SHAPES = (
    Shape(),
    Shape(heads=6, kv_heads=3, head_dim=20, block_size=7),
    Shape(heads=8, kv_heads=1, head_dim=64, block_size=16),
    Shape(heads=2, kv_heads=2, head_dim=128, block_size=1),
    Shape(heads=4, kv_heads=2, head_dim=32, block_size=600),
)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def filled(sequence: Sequence, shape: Shape, dtype: torch.dtype) -> LayerCache:
    """Memory with all of the sequence's KV."""
    length = len(sequence.keys)
    cache = memory([length], shape, dtype)
    step = ContextStep([sequence.span(0, length)], shape.block_size)
    Pointwise().store(sequence.keys, sequence.values, cache, step)
    return cache


@shapes
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_a_mixed_batch_equals_the_reference(shape: Shape, dtype: torch.dtype, tolerance: float) -> None:
    lengths = [40, 1, 70, 33, 9]
    made = sequences(lengths, shape, 1, dtype)
    cache = memory(lengths, shape, dtype)
    run(CPU, cache, shape, [(made[1], 0, 1), (made[0], 0, 39), (made[2], 0, 50)])
    parts = [(made[0], 39, 1), (made[1], 0, 1), (made[2], 50, 20), (made[3], 0, 33), (made[4], 0, 9)]
    for mine, expected in zip(run(CPU, cache, shape, parts), run(REFERENCE, cache, shape, parts), strict=True):
        torch.testing.assert_close(mine, expected, atol=tolerance, rtol=tolerance)


@shapes
@pytest.mark.parametrize("length", [PARTITION - 1, PARTITION, PARTITION + 1, 2 * PARTITION + 37])
def test_partitions_add_up_to_the_reference(shape: Shape, length: int) -> None:
    (sequence,) = sequences([length], shape, 2)
    cache = memory([length], shape)
    rows = computed(CPU, sequence, shape, [length], cache)
    last = run(REFERENCE, cache, shape, [(sequence, length - 3, 3)])[0]
    torch.testing.assert_close(rows[-3:], last, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", ["together", "in two runs", "in runs and apart"])
def test_it_does_not_matter_where_the_blocks_lie(dtype: torch.dtype, blocks: str) -> None:
    shape, lengths = Shape(heads=6, kv_heads=3, head_dim=32, block_size=16), [880]
    (made,) = sequences(lengths, shape, 5, dtype)
    count = len(made.blocks)
    orders = {
        "together": list(range(count)),
        "in two runs": [*range(20, count), *range(20)],
        "in runs and apart": [*range(30, 50), *range(29, 2, -1), *range(50, count + 3)],
    }
    made = made._replace(blocks=orders[blocks])
    cache = filled(made, shape, dtype)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for part in [(made, 879, 1), (made, 600, 64)]:
        found, expected = (torch.cat(run(attention, cache, shape, [part])) for attention in (CPU, REFERENCE))
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@given(
    shape=st.sampled_from(SHAPES),
    length=st.integers(1, 3 * PARTITION // 2),
    cuts=st.lists(st.integers(1, 3 * PARTITION // 2), max_size=6),
    seed=st.integers(0, 99),
)
def test_no_bit_depends_on_how_a_sequence_is_cut_into_steps(
    shape: Shape, length: int, cuts: list[int], seed: int
) -> None:
    (sequence,) = sequences([length], shape, seed)
    whole = computed(CPU, sequence, shape, [length], memory([length], shape))
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    chunks = [end - begin for begin, end in pairwise(edges)]
    assert torch.equal(computed(CPU, sequence, shape, chunks, memory([length], shape)), whole)


@shapes
def test_no_bit_depends_on_the_neighbours_in_the_batch(shape: Shape) -> None:
    lengths = [30, 5, 90]
    made = sequences(lengths, shape, 3)
    alone = [computed(CPU, one, shape, [len(one.keys)], memory(lengths, shape)) for one in made]
    cache = memory(lengths, shape)
    run(CPU, cache, shape, [(made[0], 0, 29), (made[2], 0, 40)])
    together = run(CPU, cache, shape, [(made[0], 29, 1), (made[1], 0, 5), (made[2], 40, 50)])
    for rows, (number, start) in zip(together, [(0, 29), (1, 0), (2, 40)], strict=True):
        assert torch.equal(rows, alone[number][start : start + len(rows)])


@pytest.mark.parametrize("attention", [CPU, REFERENCE], ids=lambda attention: str(attention.name))
def test_a_copied_beginning_serves_as_if_it_had_been_computed(attention: CpuAttention | ReferenceAttention) -> None:
    shape = Shape(block_size=8)
    (sequence,) = sequences([13], shape, 4)
    cache = memory([13], shape)
    expected = computed(attention, sequence, shape, [13], cache)
    fork = sequence._replace(blocks=[sequence.blocks[0], next(b for b in range(5) if b not in sequence.blocks)])
    Pointwise().copy([cache], [Copy(sequence.blocks[1], fork.blocks[1], 3)])
    assert cache.keys[fork.blocks[1], 3:].isnan().all(), "copied more than requested"
    assert torch.equal(torch.cat(run(attention, cache, shape, [(fork, 11, 2)])), expected[11:])


def test_copies_are_made_one_after_the_other() -> None:
    cache = memory([8], Shape())
    for block in range(3):
        cache.keys[block] = cache.values[block] = float(block)
    Pointwise().copy([cache], [Copy(1, 2, 2), Copy(0, 1, 4)])
    assert cache.keys[1].eq(0).all() and cache.values[1].eq(0).all()
    assert cache.keys[2, :2].eq(1).all() and cache.keys[2, 2:].eq(2).all()
