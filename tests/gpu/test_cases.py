"""The checks for a GPU find faults: unwritten rows, overwritten memory, impossible tokens."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.paged import LayerCache
from kernels.plain import PlainAttention
from kernels.pointwise import Pointwise
from kernels.sampling import draw
from kernels.tables import TableStep
from tests.gpu import attention_cases, draw_cases, row_cases
from tests.gpu.attention_cases import (
    BATCHES,
    BLOCK_SIZES,
    DTYPES,
    HEAD_DIMS,
    RATIOS,
    Batch,
    Shape,
    case_of,
    error_of,
    reference,
)
from tests.gpu.draw_cases import NEAR, SHAPES, Inputs, distance
from tests.gpu.place import Place
from tests.kernels.poison import poisoned
from tests.kernels.reference import attend_one

CPU = torch.device("cpu")
PLACE = Place(CPU, quick=True, until_s=time.monotonic() + 1000)
SHAPE = Shape(torch.float32, 2, 64, 16)
BATCH = Batch("mixed", [(20, 1), (0, 1), (9, 4)])


def worst(attention: Any) -> float:
    case = case_of(CPU, SHAPE, BATCH, seed=1)
    return error_of(attention, SHAPE, BATCH, case, reference(case, BATCH)).worst


class Changed(PlainAttention):
    """Correct, except for a test's changes to the results."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def attend(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        results = super().attend(queries, cache, step)
        self.change(results)
        return results


def nothing(_: Tensor) -> None:
    pass


def a_little_too_much(results: Tensor) -> None:
    results[3, 1, 5] += 1e-4


def broken_for_nobody(results: Tensor) -> None:
    results[1] = torch.nan


def not_written(results: Tensor) -> None:
    results[2] = torch.empty_like(results[2])


def test_every_type_meets_every_head_size_block_size_and_ratio() -> None:
    real = attention_cases.shapes(PLACE._replace(quick=False))
    for dtype in DTYPES:
        of_type = [shape for shape in real if shape.dtype == dtype]
        assert {(shape.head_dim, shape.block_size) for shape in of_type} == {
            (head_dim, block_size) for head_dim in HEAD_DIMS for block_size in BLOCK_SIZES
        }
        assert {shape.ratio for shape in of_type} == set(RATIOS)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: str(batch.name))
@torch.inference_mode()
def test_every_batch_that_a_gpu_gets_can_be_made_and_computed(batch: Batch) -> None:
    shape = Shape(torch.float32, 1, 64, 256)
    case = case_of(CPU, shape, batch, seed=1)
    assert error_of(PlainAttention(), shape, batch, case, reference(case, batch)).worst <= 1
    assert [length for length, rows in batch.spans if rows == 1] == [
        length for length, _ in batch.spans[: batch.decoding]
    ]


def test_the_reference_is_that_of_the_kernels() -> None:
    from kernels.contexts import Context

    case, batch = case_of(CPU, SHAPE, BATCH, seed=3), BATCH
    expected, row = reference(case, batch), 0
    for blocks, (length, rows) in zip(case.blocks, batch.spans, strict=True):
        context = Context(attention_cases.slots_of(blocks, length, 16, CPU), length - rows, rows)
        for position in range(length - rows, length) if length else ():
            one = attend_one(case.queries[row + position - length + rows], case.cache, context, position)
            torch.testing.assert_close(expected[row + position - length + rows].float(), one)
        row += rows


@pytest.mark.parametrize("change", [a_little_too_much, broken_for_nobody, not_written])
def test_attention_that_is_wrong_is_found(change: Any) -> None:
    assert worst(Changed(nothing)) <= 1
    assert not worst(Changed(change)) <= 1


def test_memory_without_a_value_is_no_number_and_only_in_there() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert torch.empty(9).isnan().all() and torch.ones(9).new_empty(3, dtype=torch.bfloat16).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_writing_where_nothing_belongs_is_found() -> None:
    expected = torch.full((4, 3), torch.nan)
    expected[1] = 1.0
    assert row_cases.worst_of(expected.clone(), expected, torch.float32) == 0
    for found in (expected.nan_to_num(0.0), torch.full_like(expected, torch.nan)):
        assert not row_cases.worst_of(found, expected, torch.float32) <= 1
    assert row_cases.worst_of(expected + 1e-3, expected, torch.float32) > 1


class Forgetful(Pointwise):
    """Keeps the values where the keys belong."""

    def store(self, keys: Tensor, values: Tensor, cache: LayerCache, step: Any) -> None:  # noqa: ARG002
        super().store(values, values, cache, step)


def test_rows_that_are_stored_wrongly_are_found() -> None:
    for kernels, good in ((Pointwise(), True), (Forgetful(), False)):
        pairs = list(row_cases.turns(PLACE, kernels, torch.float32))
        assert all(row_cases.worst_of(*pair, torch.float32) <= 1 for pair in pairs) == good


# ---- draws


def one_row(point: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0) -> Inputs:
    """Weights of 1, 2, 3 and 4 tenths."""
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    shape = [torch.tensor([value]) for value in (temperature, top_k, top_p, min_p)]
    return Inputs(logits, shape[0], shape[1], shape[2], shape[3], torch.tensor([point], dtype=torch.float64))


def test_a_token_is_as_far_as_its_share_is_from_the_point() -> None:
    assert distance(one_row(0.25), 0, 1) == 0
    assert distance(one_row(0.25), 0, 2) == pytest.approx(0.05)
    assert distance(one_row(0.25), 0, 0) == pytest.approx(0.15)
    assert distance(one_row(0.1 - 1e-6), 0, 1) <= NEAR


def test_what_may_not_be_drawn_is_infinitely_far() -> None:
    far = float("inf")
    assert distance(one_row(0.01, top_k=3), 0, 0) == far and distance(one_row(0.01, top_k=3), 0, 1) == 0
    assert distance(one_row(0.01, top_p=0.6), 0, 1) == far and distance(one_row(0.01, top_p=0.6), 0, 2) == 0
    assert distance(one_row(0.01, min_p=0.6), 0, 1) == far and distance(one_row(0.01, min_p=0.6), 0, 2) == 0
    assert distance(one_row(0.5, temperature=0.0), 0, 2) == far and distance(one_row(0.5), 0, 4) == far


def test_the_draw_of_torch_is_always_explained() -> None:
    """Also where it draws something else than the reference: here it is the reference."""
    inputs = draw_cases.inputs_of(PLACE, 400)
    found = torch.zeros(len(inputs.points), dtype=torch.int64)
    draw(*inputs, found)
    ordinary = [row for row in range(len(found)) if row not in (3, 5, 6) and SHAPES[0][0] != inputs.temperatures[row]]
    assert len(ordinary) > 10
    assert all(distance(inputs, row, int(found[row])) <= NEAR for row in ordinary)
