"""Products with packed weights equal torch's own, and a row's bits do not depend on the rows beside it."""

import pytest
import torch
from torch.nn import functional

from kernels.linear import can_pack, linear

SIZES = [(64, 192), (1024, 3072), (33, 77), (1, 5), (4864, 896)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("inputs", "outputs", "biased"), [*((*size, False) for size in SIZES), (256, 1000, True)])
@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch cannot pack weights")
def test_no_bit_of_a_row_depends_on_the_other_rows(inputs: int, outputs: int, biased: bool) -> None:
    weight, bias = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs) if biased else None
    rows = torch.randn(1100, inputs)
    multiply = linear(weight.clone(), bias)
    whole = multiply(rows)
    torch.testing.assert_close(whole, functional.linear(rows, weight, bias), atol=2e-5, rtol=2e-5)
    for count in (1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 100, 300, 511, 513, 1025):
        assert torch.equal(multiply(rows[41 : 41 + count].clone()), whole[41 : 41 + count]), f"{count} rows"


def test_without_packing_the_product_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.linear.can_pack", lambda _: False)
    weight, bias, rows = torch.randn(7, 5), torch.randn(7), torch.randn(3, 5)
    assert torch.equal(linear(weight, bias)(rows), functional.linear(rows, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_equal_torch_within_their_rounding(dtype: torch.dtype) -> None:
    weight, bias, rows = torch.randn(96, 64) / 8, torch.randn(96), torch.randn(5, 64)
    mine = linear(weight.to(dtype), bias.to(dtype))(rows.to(dtype))
    torch.testing.assert_close(mine.float(), functional.linear(rows, weight, bias), atol=5e-2, rtol=3e-2)
