"""Attention over tables with torch alone equals the reference."""

import pytest
import torch

from kernels.plain import ROWS, TOKENS, PlainAttention
from tests.kernels.sequences import Shape
from tests.kernels.tables import both
from tests.kernels.test_cpu import SHAPES

PLAIN = PlainAttention()
EXACT = 2e-6
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@shapes
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, EXACT), (torch.bfloat16, 2e-2)])
def test_a_mixed_batch_equals_the_reference(shape: Shape, dtype: torch.dtype, tolerance: float) -> None:
    spans = [(40, 1), (1, 1), (70, 20), (33, 33), (9, 1)]
    mine, expected = both(PLAIN, shape, spans, 2, dtype)
    torch.testing.assert_close(mine, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("spans", [[(TOKENS + 3, 1), (5, 1)], [(ROWS + 7, ROWS + 7), (2 * TOKENS, 3)]], ids=str)
def test_tiles_add_up_to_the_reference(spans: list[tuple[int, int]]) -> None:
    mine, expected = both(PLAIN, Shape(), spans, sum(count == 1 for _, count in spans))
    torch.testing.assert_close(mine, expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("nobody", range(4))
def test_rows_of_a_sequence_without_tokens_come_out_finite(nobody: int) -> None:
    spans = [(9, 1), (7, 1), (30, 4), (11, 5)]
    mine, expected = both(PLAIN, Shape(), spans, 2, lengths_off={nobody: -spans[nobody][0]})
    begin = sum(count for _, count in spans[:nobody])
    end = begin + spans[nobody][1]
    assert mine[begin:end].isfinite().all()
    mine[begin:end] = expected[begin:end]
    torch.testing.assert_close(mine, expected, atol=EXACT, rtol=EXACT)


def test_one_token_too_many_is_seen_to_be_read() -> None:
    """The other tests rely on this: there is no number behind a sequence's end."""
    mine, _ = both(PLAIN, Shape(), [(9, 1), (30, 4)], 1, lengths_off={0: 1, 1: 1})
    assert mine.isnan().any(dim=-1).any(dim=-1).tolist() == [True, False, False, False, True]
