"""Triton's changes by adapters equal torch's, for rows of any adapters and of none."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton", reason="there is no Triton here: see `make triton-check`")

import torch
from torch import Tensor

from kernels.adapters import ROOM, TILE, Change, Table, Tiles, blank, change_of, cut
from kernels.gpu.pointwise import TritonPointwise
from kernels.pointwise import Pointwise
from tests.kernels.gpu.device import DEVICE, HALF, needs_device
from tests.kernels.poison import poisoned

pytestmark = needs_device

TOLERANCES = {torch.float32: 2e-5, HALF: 1.5e-1 if torch.bfloat16 == HALF else 2e-2}
SHAPES = {
    "one part": (96, (64,)),
    "queries, keys and values": (72, (128, 40, 40)),
    "wider than a program": (300, (520, 520)),
    "odd": (50, (35, 21)),
}
BATCHES = {
    "each has its own": [-1, 1, 3, 3, 2, 1, -1, 1, 3, 1, 0],
    "a prompt of several tiles among others": [3, -1, *[1] * (2 * TILE + 5), *[3] * TILE, -1, 1],
    "one row": [3],
}


def change(width: int, columns: Sequence[int], ranks: Sequence[int], dtype: torch.dtype) -> Change:
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
    kept = [one._replace(weight=up) for one, (up, *_) in zip(made.ups, ups, strict=True)]
    return replace(made, weight=down, ups=kept)


def put(table: Table, slot: int, change: Change | None) -> None:
    table.numbers[slot] = torch.tensor(table.put(slot, change))


def random_matrix(*size: int) -> Tensor:
    return torch.randn(*size, device=DEVICE) / 8


def tiles_of(slots: Sequence[int], spare: int = 0) -> Tiles:
    """With spare tiles, as a graph has."""
    rows, tiles = cut(np.array(slots, np.int32))
    tiles = np.pad(tiles, ((0, spare), (0, 0)))
    return Tiles(*(torch.from_numpy(array).to(DEVICE, torch.int32) for array in (rows, tiles)))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", ["odd", *(pytest.param(one, marks=pytest.mark.grid) for one in [*SHAPES][:3])])
@pytest.mark.parametrize("batch", BATCHES)
def test_rows_get_what_their_adapters_change(dtype: torch.dtype, shape: str, batch: str) -> None:
    torch.manual_seed(1)
    chance = random.Random(shape)
    (width, columns), slots = SHAPES[shape], BATCHES[batch]
    table = Table(blank(1, 4, torch.device(DEVICE))[0], even=1 if shape == "odd" else 8)
    changes = {}  # nothing was ever in slots 0 and 2
    for slot in (1, 3):
        ranks = tuple(chance.choice((0, 8, 16, 24)) for _ in columns[1:])
        changes[slot] = change(width, columns, (chance.choice((8, 64)), *ranks), dtype)
        put(table, slot, changes[slot])
    before = random_matrix(len(slots), sum(columns)).to(dtype)
    inputs = random_matrix(len(slots), width).to(dtype)
    expected, product = before.clone(), before.clone()
    Pointwise().adapt(inputs, expected, table, tiles_of(slots), ROOM)
    with poisoned():
        TritonPointwise().adapt(inputs, product, table, tiles_of(slots, spare=2), ROOM)
    torch.testing.assert_close(product, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    untouched = torch.tensor([slot in (-1, 0, 2) for slot in slots], device=DEVICE)
    assert torch.equal(product[untouched], before[untouched])
    assert not torch.equal(product, before)
    put(table, 1, None)
    put(table, 3, None)
    TritonPointwise().adapt(inputs, before, table, tiles_of(slots), ROOM)
    assert torch.equal(before[untouched], product[untouched])


@pytest.mark.parametrize("rank", [8, *(pytest.param(one, marks=pytest.mark.grid) for one in (256, 600))])
def test_every_rank_and_number_of_tiles_is_computed(rank: int) -> None:
    """Many tiles read whole rows, and few divide them among programs."""
    torch.manual_seed(rank)
    table = Table(blank(1, 3, torch.device(DEVICE))[0], even=8)
    changes = [change(136, (24, 16), (rank, 8), torch.float32) for _ in range(2)]
    for slot, one in enumerate(changes, start=1):
        put(table, slot, one)
    for rows in (5, 600 if rank == 8 else 40):
        slots = [random.Random(row).choice((1, 2, -1)) for row in range(rows)]
        inputs, product = random_matrix(rows, 136), random_matrix(rows, 40)
        expected = product.clone()
        Pointwise().adapt(inputs, expected, table, tiles_of(slots), rank + 8)
        TritonPointwise().adapt(inputs, product, table, tiles_of(slots), rank + 8)
        torch.testing.assert_close(product, expected, atol=1e-4, rtol=1e-4)
