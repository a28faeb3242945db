"""Adapters' changes of a product in Triton, in two launches, for rows that each have any adapter or none.

The rows of one adapter are computed in tiles, as matrix products, with its factors, whose addresses are in a table. So
one pair of kernels serves prompts, which have many rows of an adapter, and decoding, where each may have its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapters import ALIGNED, EVEN, NUMBERS, PARTS, TILE, Table, Tiles
from kernels.gpu.jit import jit_for_any

RANKS = 64  # a program computes this many at a time
DEPTH = 64  # inputs that it adds up at a time
COLUMNS = 128  # a program's part of a product
RANK_STEP = 32  # ranks that it adds up at a time
SPLITS = 8  # the most parts of the inputs among programs: few tiles would leave most of the device idle
PROGRAMS = 512  # this number of programs fills a device


def adapt(inputs: Tensor, product: Tensor, table: Table, tiles: Tiles, room: int) -> None:
    """Add to the rows of the product what their adapters change, whose ranks are `room` together at most."""
    count, width = len(tiles.tiles), inputs.shape[1]
    if not count:
        return
    splits = max(1, min(SPLITS, PROGRAMS // count))
    lowered = torch.empty(splits, count * TILE, room, dtype=torch.float32, device=inputs.device)
    lower_tile[count, splits](
        *(inputs, lowered, tiles.rows, tiles.tiles, table.numbers, inputs.stride(0), room),
        *(width, NUMBERS, ALIGNED, TILE, RANKS, DEPTH),
    )
    raise_tile[count, triton.cdiv(product.shape[1], COLUMNS)](
        *(lowered, product, tiles.rows, tiles.tiles, table.numbers, product.stride(0), room, splits),
        *(NUMBERS, PARTS, ALIGNED, EVEN, table.even, TILE, RANK_STEP, COLUMNS),
    )


@jit_for_any("room")
def lower_tile(
    inputs: tl.tensor,
    lowered: tl.tensor,  # [splits, tiles, tile_rows, room]
    rows: tl.tensor,
    tiles: tl.tensor,
    numbers: tl.tensor,
    row_stride: tl.tensor,
    room: tl.tensor,
    width: tl.constexpr,
    number_count: tl.constexpr,
    aligned: tl.constexpr,
    tile_rows: tl.constexpr,
    ranks: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot, first_row = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    row_count = tl.load(tiles + 3 * tile + 2) - first_row
    if row_count == 0:
        return
    rank_count = tl.load(numbers + slot * number_count).to(tl.int32)
    down = tl.load(numbers + slot * number_count + 1).to(tl.pointer_type(inputs.dtype.element_ty))
    down = tl.multiple_of(down, aligned)
    lane = tl.arange(0, tile_rows)
    row = tl.load(rows + first_row + lane, mask=lane < row_count, other=0).to(tl.int64)
    share = tl.cdiv(tl.cdiv(width, depth), splits) * depth
    begin, end = split * share, tl.minimum((split + 1) * share, width)
    for first in range(0, rank_count, ranks):
        rank = first + tl.arange(0, ranks)
        total = tl.zeros([tile_rows, ranks], tl.float32)
        for at in range(begin, end, depth):
            column = at + tl.arange(0, depth)
            inside = (lane < row_count)[:, None] & (column < width)[None, :]
            given = tl.load(inputs + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
            inside = (rank < rank_count)[:, None] & (column < width)[None, :]
            factors = tl.load(down + rank[:, None] * width + column[None, :], mask=inside, other=0.0)
            total = tl.dot(given, factors.T, total, input_precision="ieee")
        place = (split * tl.num_programs(0) + tile) * tile_rows + lane
        inside = (lane < row_count)[:, None] & (rank < rank_count)[None, :]
        tl.store(lowered + place.to(tl.int64)[:, None] * room + rank[None, :], total, mask=inside)


@jit_for_any("room", "splits")
def raise_tile(
    lowered: tl.tensor,  # [splits, tiles, tile_rows, room]
    product: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    numbers: tl.tensor,
    row_stride: tl.tensor,
    room: tl.tensor,
    splits: tl.tensor,
    number_count: tl.constexpr,
    parts: tl.constexpr,
    aligned: tl.constexpr,
    even_rank: tl.constexpr,
    even_column: tl.constexpr,
    tile_rows: tl.constexpr,
    rank_step: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    tile, first_column = tl.program_id(0), tl.program_id(1) * columns
    slot, first_row = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    row_count = tl.load(tiles + 3 * tile + 2) - first_row
    if row_count == 0:
        return
    lane, column = tl.arange(0, tile_rows), first_column + tl.arange(0, columns)
    row = tl.load(rows + first_row + lane, mask=lane < row_count, other=0).to(tl.int64)
    for part in tl.static_range(parts):
        about = numbers + slot * number_count + 2 + 5 * part
        first = tl.multiple_of(tl.load(about).to(tl.int32), even_rank)
        count = tl.multiple_of(tl.load(about + 1).to(tl.int32), even_rank)
        begin = tl.multiple_of(tl.load(about + 2).to(tl.int32), even_column)
        end = tl.multiple_of(tl.load(about + 3).to(tl.int32), even_column)
        if (count > 0) & (begin < first_column + columns) & (end > first_column):
            up = tl.load(about + 4).to(tl.pointer_type(product.dtype.element_ty))
            up = tl.multiple_of(up, aligned)
            inside = (column >= begin) & (column < end)
            total = tl.zeros([tile_rows, columns], tl.float32)
            for at in range(0, count, rank_step):
                rank = at + tl.arange(0, rank_step)
                given = tl.zeros([tile_rows, rank_step], tl.float32)
                known = (lane < row_count)[:, None] & (rank < count)[None, :]
                for split in range(splits):
                    place = (split * tl.num_programs(0) + tile) * tile_rows + lane
                    places = lowered + place.to(tl.int64)[:, None] * room + (first + rank)[None, :]
                    given += tl.load(places, mask=known, other=0.0)
                places = up + (column - begin)[:, None] * count + rank[None, :]
                factors = tl.load(places, mask=inside[:, None] & (rank < count)[None, :], other=0.0)
                total = tl.dot(given.to(factors.dtype), factors.T, total, input_precision="ieee")
            places = product + row[:, None] * row_stride + column[None, :]
            changed = (lane < row_count)[:, None] & inside[None, :]
            before = tl.load(places, mask=changed, other=0.0).to(tl.float32)
            tl.store(places, (before + total).to(product.dtype.element_ty), mask=changed)
