"""The changes of adapters in a product, and tables of them that stay where they are.

A graph of a step reads the tables when it is replayed, so it serves whatever adapters are in them then.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear import Linear, linear

PARTS = 3  # projections of one product, at most
ADDRESSES = 1 + PARTS  # of the first factors and of each part's second one
# The rank of all parts together; and of each part its first rank there, its rank, and where its columns begin and end.
NUMBERS = 1 + 4 * PARTS
ROOM = 256  # for ranks of all parts together


class Up(NamedTuple):
    """The second factor of one projection: from some columns of what the first ones gave to some of the product."""

    product: Linear
    weight: Tensor | None  # [outputs, rank]; None on a CPU, which has packed it
    inputs: slice
    outputs: slice


class Change(NamedTuple):
    """The part of one adapter that changes a product: the first factors of its projections are one."""

    down: Linear
    weight: Tensor | None  # [ranks, inputs]
    ranks: int
    ups: list[Up]

    @property
    def fits(self) -> bool:
        """True if a table can have it."""
        return self.ranks <= ROOM and len(self.ups) <= PARTS

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
    """One product's changes by slot; slot 0 is that of rows without an adapter."""

    def __init__(self, slots: int, device: torch.device) -> None:
        # Of packed weights, which have no address. Others belong to whoever loaded them.
        self.changes: list[Change | None] = [None] * slots
        self.addresses = torch.zeros(slots, ADDRESSES, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(slots, NUMBERS, dtype=torch.int32, device=device)

    def put(self, slot: int, change: Change | None) -> None:
        """Write it in the order of the device's work."""
        self.changes[slot] = None if change is None or change.weight is not None else change
        addresses, numbers = [0] * ADDRESSES, [0] * NUMBERS
        if change is not None and change.weight is not None:
            weights = [change.weight, *(up.weight for up in change.ups)]
            for place, weight in enumerate(weights):
                assert weight is not None, "all are kept"
                addresses[place] = weight.data_ptr()
            numbers[0] = change.ranks
            for place, up in enumerate(change.ups):
                rank = up.inputs.stop - up.inputs.start
                numbers[1 + 4 * place : 5 + 4 * place] = up.inputs.start, rank, up.outputs.start, up.outputs.stop
        self.addresses[slot] = torch.tensor(addresses)
        self.numbers[slot] = torch.tensor(numbers, dtype=torch.int32)
