"""Triton's changes by adapters equal torch's, for rows of any adapters and of none."""

import random

import pytest

pytest.importorskip("triton", reason="there is no Triton here: see `make triton-check`")

import torch
from torch import Tensor

from kernels.adapters import ROOM, Change, Table, change_of
from kernels.gpu.pointwise import TritonPointwise
from tests.kernels.gpu.device import DEVICE, needs_device

pytestmark = needs_device

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}
SHAPES = {
    "one part": (96, (64,)),
    "queries, keys and values": (72, (128, 40, 40)),
    "wider than a program": (300, (520, 520)),
}


def change(width: int, columns: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype) -> Change:
    """A rank of 0: the part is not changed."""
    ups, first, begin = [], 0, 0
    for count, rank in zip(columns, ranks, strict=True):
        if rank:
            up = random_matrix(count, rank).to(dtype)
            ups.append((up, slice(first, first + rank), slice(begin, begin + count)))
        first, begin = first + rank, begin + count
    down = random_matrix(first, width).to(dtype)
    made = change_of(down, ups)
    # Kept on a CPU, too: the interpreter reads its memory.
    return made._replace(
        weight=down, ups=[one._replace(weight=up) for one, (up, *_) in zip(made.ups, ups, strict=True)]
    )


def random_matrix(*size: int) -> Tensor:
    return torch.randn(*size, device=DEVICE) / 8


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_get_what_their_adapters_change(dtype: torch.dtype, shape: str) -> None:
    torch.manual_seed(1)
    chance = random.Random(shape)
    width, columns = SHAPES[shape]
    table = Table(4, torch.device(DEVICE))
    changes = {}  # nothing was ever in slot 2
    for slot in (1, 3):
        ranks = tuple(chance.choice((0, 8, 16, 24)) for _ in columns[1:])
        changes[slot] = change(width, columns, (chance.choice((8, 64)), *ranks), dtype)
        table.put(slot, changes[slot])
    inputs, product = (random_matrix(11, size).to(dtype) for size in (width, sum(columns)))
    slots = torch.tensor([0, 1, 3, 3, 2, 1, 0, 1, 3, 1, 0], dtype=torch.int32, device=DEVICE)
    expected = product.clone()
    for slot, made in changes.items():
        made.add(inputs, expected, (slots == slot).nonzero()[:, 0])
    untouched = product.clone()
    TritonPointwise().adapt(inputs, product, table, slots)
    torch.testing.assert_close(product, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(product[slots % 2 == 0], untouched[slots % 2 == 0])
    assert not torch.equal(product, untouched)
    table.put(1, None)
    table.put(3, None)
    TritonPointwise().adapt(inputs, untouched, table, slots)
    assert torch.equal(untouched[slots % 2 == 0], product[slots % 2 == 0])


def test_what_a_table_cannot_have_is_known() -> None:
    assert change(8, (4,), (ROOM,), torch.float32).fits
    assert not change(8, (4,), (ROOM + 1,), torch.float32).fits
