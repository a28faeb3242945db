"""The changes of adapters in a product, and tables of them that stay where they are.

A graph of a step reads the tables when it is replayed, so it serves whatever adapters are in them then.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.linear import Linear, linear

PARTS = 3  # projections of one product, at most
ADDRESSES = 1 + PARTS  # of the first factors and of each part's second one
# The rank of all parts together; and of each part its first rank there, its rank, and where its columns begin and end.
NUMBERS = 1 + 4 * PARTS
EVEN = 8  # divides every rank in a table
ALIGNED = 16  # bytes: where a factor in a table begins
ROOM = 256  # for ranks of all parts together, in a graph
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


class Table:
    """One product's changes by slot, which belong to whoever loaded them; slot 0 has none."""

    def __init__(self, slots: int, device: torch.device, even: int = 1) -> None:
        """`even` divides the columns where the product's projections begin and end."""
        self._changes: list[ref[Change] | None] = [None] * slots
        self.even = even
        self.addresses = torch.zeros(slots, ADDRESSES, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(slots, NUMBERS, dtype=torch.int32, device=device)

    def change(self, slot: int) -> Change | None:
        held = self._changes[slot]
        return None if held is None else held()

    def put(self, slot: int, change: Change | None) -> None:
        """Write it in the order of the device's work."""
        self._changes[slot] = None if change is None else ref(change)
        addresses, numbers = [0] * ADDRESSES, [0] * NUMBERS
        if change is not None and change.weight is not None:
            weights = [change.weight, *(up.weight for up in change.ups)]
            for place, weight in enumerate(weights):
                assert weight is not None and weight.data_ptr() % ALIGNED == 0, "all are kept where kernels expect them"
                addresses[place] = weight.data_ptr()
            numbers[0] = change.ranks
            for place, up in enumerate(change.ups):
                rank = up.inputs.stop - up.inputs.start
                columns = up.outputs.start, up.outputs.stop
                assert rank % EVEN == 0 and not any(column % self.even for column in columns), (rank, columns)
                numbers[1 + 4 * place : 5 + 4 * place] = up.inputs.start, rank, *columns
        self.addresses[slot] = torch.tensor(addresses)
        self.numbers[slot] = torch.tensor(numbers, dtype=torch.int32)


class Tiles(NamedTuple):
    """The rows of a step that have adapters, cut into tiles whose rows have the same one."""

    rows: Tensor  # their numbers, adapter by adapter
    tiles: Tensor  # [tiles, 3]: an adapter's slot, and where the tile begins and ends among the rows; zeros: none

    def by_slot(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each adapter's slot and rows; this asks the device."""
        there = [(slot, begin, end) for slot, begin, end in self.tiles.tolist() if end]
        for slot, group in groupby(there, key=lambda tile: tile[0]):
            tiles = list(group)
            yield slot, self.rows[tiles[0][1] : tiles[-1][2]]


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
