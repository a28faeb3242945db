"""The changes of adapters in a product, and tables of them that stay where they are.

A graph of a step reads the tables when it is replayed, so it serves whatever adapters are in them then.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.linear import Linear, linear

PARTS = 3  # projections of one product, at most
# A slot of a table has the rank of all parts together, and where the first factors lie; and of each part its first rank
# there, its rank, where its columns begin and end, and where the second factor lies.
NUMBERS = 2 + 5 * PARTS + 1  # and one more, so that tables are aligned
EVEN = 8  # divides every rank in a table
ALIGNED = 16  # bytes: where a factor in a table begins
ROOM = 256  # a graph has room for ranks of all parts together
TILE = 32  # rows of one adapter that a kernel computes together


class Up(NamedTuple):
    """The second factor of one projection: from some columns of what the first ones gave to some of the product."""

    product: Linear
    weight: Tensor | None  # [outputs, rank]; None on a CPU, which has packed it
    inputs: slice
    outputs: slice


@dataclass(frozen=True)
class Change:
    """The part of one adapter that changes a product: the first factors of its projections are one."""

    down: Linear
    weight: Tensor | None  # [ranks, inputs]
    ranks: int
    ups: list[Up]

    def add(self, inputs: Tensor, product: Tensor, rows: Tensor) -> None:
        """Add it to these rows of the product."""
        lowered = self.down(inputs[rows])
        for up in self.ups:
            product[rows, up.outputs] += up.product(lowered[:, up.inputs])


def change_of(down: Tensor, ups: list[tuple[Tensor, slice, slice]]) -> Change:
    """Make it of the weights; of each projection with its inputs and outputs."""
    return Change(
        linear(down),
        _kept(down),
        len(down),
        [Up(linear(up), _kept(up), inputs, outputs) for up, inputs, outputs in ups],
    )


def _kept(weight: Tensor) -> Tensor | None:
    return None if weight.device.type == "cpu" else weight.contiguous()


def blank(tables: int, slots: int, device: torch.device) -> Tensor:
    """The numbers of tables without changes."""
    return torch.zeros(tables, slots, NUMBERS, dtype=torch.int64, device=device)


class Table:
    """One product's changes by slot; slot 0 has none."""

    def __init__(self, numbers: Tensor, even: int = 1) -> None:
        """`even` divides the columns where the product's projections begin and end."""
        self.numbers = numbers
        self.even = even
        self._changes: list[Change | None] = [None] * len(numbers)

    def change(self, slot: int) -> Change | None:
        return self._changes[slot]

    def put(self, slot: int, change: Change | None) -> list[int]:
        """Return what is to be written into the slot's numbers."""
        self._changes[slot] = change
        if change is None or change.weight is None:
            return [0] * NUMBERS
        numbers = [change.ranks, _address(change.weight)]
        for up in change.ups:
            rank, columns = up.inputs.stop - up.inputs.start, (up.outputs.start, up.outputs.stop)
            assert rank % EVEN == 0 and not any(column % self.even for column in columns), (rank, columns)
            numbers += [up.inputs.start, rank, *columns, _address(up.weight)]
        return numbers + [0] * (NUMBERS - len(numbers))


def _address(weight: Tensor | None) -> int:
    assert weight is not None and weight.data_ptr() % ALIGNED == 0, "all are kept where kernels expect them"
    return weight.data_ptr()


@dataclass(frozen=True)
class Tiles:
    """The rows of a step that have adapters, cut into tiles whose rows have the same one."""

    rows: Tensor  # their numbers, adapter by adapter
    tiles: Tensor  # [tiles, 3]: an adapter's slot, and where the tile begins and ends among the rows; zeros: none

    @cached_property
    def by_slot(self) -> list[tuple[int, Tensor]]:
        """Each adapter's slot and rows; the first time this asks the device."""
        there = [(slot, begin, end) for slot, begin, end in self.tiles.tolist() if end]
        found = []
        for slot, group in groupby(there, key=lambda tile: tile[0]):
            tiles = list(group)
            found.append((slot, self.rows[tiles[0][1] : tiles[-1][2]]))
        return found


def most_tiles(rows: int, adapters: int) -> int:
    """As many as so many rows with so many different adapters can be cut into."""
    return rows // TILE + min(rows, adapters)


class Cut(NamedTuple):
    """Tiles on the host."""

    rows: NDArray[np.int64]
    tiles: NDArray[np.int64]


def cut(slots: NDArray[np.int32]) -> Cut:
    """Cut rows into tiles by the slot of each, which is -1 where it has no adapter."""
    rows = np.flatnonzero(slots >= 0)
    rows = rows[np.argsort(slots[rows], kind="stable")]
    of_rows = slots[rows]
    bounds = [0, *(np.flatnonzero(np.diff(of_rows)) + 1).tolist(), len(rows)]
    tiles = [
        (of_rows[begin], first, min(first + TILE, end))
        for begin, end in pairwise(bounds)
        for first in range(begin, end, TILE)
    ]
    return Cut(rows, np.array(tiles, np.int64).reshape(-1, 3))
