"""Adapters' changes of a product in Triton, in two launches, for rows that each have any adapter or none.

A row's program reads the factors of its own adapter, whose addresses are in a table. That suits decoding, where a step
has few rows for each adapter; many rows of one are better served by a matrix product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapters import ADDRESSES, NUMBERS, PARTS, ROOM, Table
from kernels.gpu.jit import jit

RANKS = 16  # of a program, and of a step of one
COLUMNS = 256  # of a product that a program computes
DEPTH = 128  # inputs that a program adds up at a time


def adapt(inputs: Tensor, product: Tensor, table: Table, slots: Tensor) -> None:
    """Add to each row of the product what the adapter in its slot changes."""
    rows, width = inputs.shape
    if not rows:
        return
    lowered = torch.empty(rows, ROOM, dtype=torch.float32, device=inputs.device)
    lower_row[rows, ROOM // RANKS](
        *(inputs, lowered, slots, table.addresses, table.numbers, inputs.stride(0), width),
        *(ADDRESSES, NUMBERS, ROOM, RANKS, DEPTH),
    )
    raise_row[rows, triton.cdiv(product.shape[1], COLUMNS)](
        *(lowered, product, slots, table.addresses, table.numbers, product.stride(0), product.shape[1]),
        *(ADDRESSES, NUMBERS, PARTS, ROOM, RANKS, COLUMNS),
    )


@jit
def lower_row(
    inputs: tl.tensor,
    lowered: tl.tensor,
    slots: tl.tensor,
    addresses: tl.tensor,
    numbers: tl.tensor,
    row_stride: tl.tensor,
    width: tl.constexpr,
    address_count: tl.constexpr,
    number_count: tl.constexpr,
    room: tl.constexpr,
    ranks: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1) * ranks + tl.arange(0, ranks)
    slot = tl.load(slots + row)
    count = tl.load(numbers + slot * number_count)
    if tl.program_id(1) * ranks < count:
        down = tl.load(addresses + slot * address_count).to(tl.pointer_type(inputs.dtype.element_ty))
        total = tl.zeros([ranks], tl.float32)
        for begin in range(0, width, depth):
            column = begin + tl.arange(0, depth)
            given = tl.load(inputs + row * row_stride + column, mask=column < width, other=0.0).to(tl.float32)
            inside = (rank < count)[:, None] & (column < width)[None, :]
            factors = tl.load(down + rank[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(factors * given[None, :], axis=1)
        tl.store(lowered + row * room + rank, total, mask=rank < count)


@jit
def raise_row(
    lowered: tl.tensor,
    product: tl.tensor,
    slots: tl.tensor,
    addresses: tl.tensor,
    numbers: tl.tensor,
    row_stride: tl.tensor,
    width: tl.constexpr,
    address_count: tl.constexpr,
    number_count: tl.constexpr,
    parts: tl.constexpr,
    room: tl.constexpr,
    ranks: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    slot = tl.load(slots + row)
    if tl.load(numbers + slot * number_count) > 0:
        total = tl.zeros([columns], tl.float32)
        for part in tl.static_range(parts):
            about = numbers + slot * number_count + 1 + 4 * part
            first, count = tl.load(about), tl.load(about + 1)
            begin, end = tl.load(about + 2), tl.load(about + 3)
            up = tl.load(addresses + slot * address_count + 1 + part).to(tl.pointer_type(product.dtype.element_ty))
            for tile in range(0, count, ranks):
                rank = tile + tl.arange(0, ranks)
                given = tl.load(lowered + row * room + first + rank, mask=rank < count, other=0.0)
                inside = ((column >= begin) & (column < end))[:, None] & (rank < count)[None, :]
                places = up + (column - begin)[:, None].to(tl.int64) * count + rank[None, :]
                factors = tl.load(places, mask=inside, other=0.0).to(tl.float32)
                total += tl.sum(factors * given[None, :], axis=1)
        places = product + row * row_stride + column
        before = tl.load(places, mask=column < width, other=0.0).to(tl.float32)
        tl.store(places, (before + total).to(product.dtype.element_ty), mask=column < width)
