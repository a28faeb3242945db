"""Paged attention in Triton: each program has some rows of one KV head, and walks the tokens that these see.

Rows are packed. All query heads of a group read the same keys, so they are rows of one product:

    decode    row = head of the group                       tile of a sequence: its group, filled up to 16 rows
    prefill   row = token * group + head of the group       tiles of a sequence: so many such rows each

A sequence's tokens go by in tiles, and nothing behind its last token is read, of neither the memory nor the tables:
what was never written may be no number, which times zero is no number either.

A sequence that decodes is cut into splits where there are too few sequences to fill the device, and `combine_splits`
adds them up. How many depends on how many sequences there are and how long one may get, on no length: a graph keeps it.
"""

from functools import cache
from subprocess import CalledProcessError
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from kernels.gpu.jit import jit, jit_for_any, power_of_two
from kernels.paged import Attention, LayerCache
from kernels.tables import TableStep

LOG2_E = 1.4426950408889634  # exp2 is what the hardware has
MIN_ROWS = 16  # of a product
MAX_ROWS = 128
TILE_BYTES = 16384  # of keys, and as many of values: with STAGES, three programs of a decode are on a processor at once
MAX_TILE = 128
STAGES = 5  # a tile goes through two loads, of the table and by it: so two tiles are in flight while one is computed
WAVES = 4  # programs for each processor, so that an uneven end costs little
MAX_SPLITS = 64
OLDEST = (8, 0)  # compute capability


class TritonAttention(Attention[TableStep]):
    name = "triton"

    def __init__(self, processors: int | None = None) -> None:
        """`processors` of the device; None: as many as it says."""
        self._processors = processors

    def attend(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        results = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if step.decoding:
            self._decode(queries[: step.decoding], cache, step, results)
        if step.prefilling:
            _prefill(queries[step.decoding :], cache, step, results[step.decoding :])
        return results

    def decode(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        results = torch.empty_like(queries, memory_format=torch.contiguous_format)
        self._decode(queries, cache, step, results)
        return results

    def prefill(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        results = torch.empty_like(queries, memory_format=torch.contiguous_format)
        _prefill(queries, cache, step, results)
        return results

    def _decode(self, queries: Tensor, cache: LayerCache, step: TableStep, results: Tensor) -> None:
        sequences, heads, head_dim = queries.shape
        sizes = sizes_of(queries, cache)
        splits = self._splits(sequences, sizes, step.longest, queries.device)
        whole = splits == 1
        partial = results if whole else queries.new_empty(sequences, heads, splits, head_dim, dtype=torch.float32)
        marks = results if whole else queries.new_empty(sequences, heads, splits, dtype=torch.float32)
        decode_split[sizes.kv_heads, sequences, splits](
            *(queries, *cache, step.tables, step.lengths, partial, marks),
            *(head_dim**-0.5 * LOG2_E, queries.stride(0), *cache.keys.stride()[:3], step.tables.stride(0), splits),
            *(sizes.group, head_dim, sizes.padded_dim, cache.keys.shape[1], sizes.tile),
            rows=max(MIN_ROWS, power_of_two(sizes.group)),
            whole=whole,
            **launch_of(queries.dtype, warps=4),
        )
        if not whole:
            sizes_of_splits = (head_dim, sizes.padded_dim, sizes.tile, power_of_two(splits))
            combine_splits[sequences, heads](partial, marks, step.lengths, results, splits, *sizes_of_splits)

    def _splits(self, sequences: int, sizes: "Sizes", longest: int, device: torch.device) -> int:
        wanted = WAVES * (self._processors or processors(device))
        missing = power_of_two(-(-wanted // (sequences * sizes.kv_heads)))
        return min(missing, MAX_SPLITS, -(-longest // sizes.tile))


def tried(dtype: torch.dtype, block_size: int, device: str = "cuda") -> TritonAttention:
    """RuntimeError: the device is too old, or nothing is there to compile what launches a kernel."""
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        raise RuntimeError(
            "Triton's products need compute capability {}.{}; this device has {}.{}".format(*OLDEST, *capability)
        )
    attention = TritonAttention()
    memory = torch.zeros(1, block_size, 1, 16, dtype=dtype, device=device)
    numbers = torch.tensor([0, 1], dtype=torch.int32, device=device)
    step = TableStep(numbers[:1], numbers[:1], numbers[:1, None], numbers[1:], numbers, 1, 0, 0, block_size)
    try:
        attention.decode(memory[:, 0], LayerCache(memory, memory), step)
    except (CalledProcessError, TritonError) as error:
        raise RuntimeError(f"Triton cannot compile here: {error}") from error
    return attention


class Sizes(NamedTuple):
    kv_heads: int
    group: int  # query heads that share a KV head
    padded_dim: int
    tile: int  # tokens


def sizes_of(queries: Tensor, cache: LayerCache) -> Sizes:
    kv_heads, head_dim = cache.keys.shape[2:]
    padded_dim = max(16, power_of_two(head_dim))
    tile = min(MAX_TILE, max(16, TILE_BYTES // (padded_dim * queries.itemsize)))
    return Sizes(kv_heads, queries.shape[1] // kv_heads, padded_dim, tile)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _prefill(queries: Tensor, cache: LayerCache, step: TableStep, results: Tensor) -> None:
    head_dim = queries.shape[2]
    sizes = sizes_of(queries, cache)
    rows = prefill_rows(step.longest_prefill * sizes.group, queries.dtype)
    tiles = triton.cdiv(step.longest_prefill * sizes.group, rows)
    prefill_tile[tiles, sizes.kv_heads, len(step.lengths) - step.decoding](
        *(queries, *cache, step.tables, step.lengths, step.starts, results),
        *(head_dim**-0.5 * LOG2_E, queries.stride(0), *cache.keys.stride()[:3], step.tables.stride(0), step.decoding),
        *(sizes.group, head_dim, sizes.padded_dim, cache.keys.shape[1], sizes.tile),
        rows=rows,
        **launch_of(queries.dtype, warps=8 if rows == MAX_ROWS else 4),
    )


def prefill_rows(longest: int, dtype: torch.dtype) -> int:
    """Of a tile: few sizes, for each is compiled."""
    if dtype == torch.float32 or longest <= MIN_ROWS:
        return MIN_ROWS
    return MAX_ROWS if longest > MAX_ROWS // 2 else MAX_ROWS // 2


def launch_of(dtype: torch.dtype, warps: int) -> dict[str, int]:
    """Products in float32, which is not rounded for the matrix units, are done in registers: more warps have more."""
    return {"num_warps": 8, "num_stages": 3} if dtype == torch.float32 else {"num_warps": warps, "num_stages": STAGES}


# ---- kernels


@jit_for_any("splits", "table_stride")
def decode_split(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    results: tl.tensor,  # [sequences, heads, splits, head_dim]
    marks: tl.tensor,  # [sequences, heads, splits]: log2 of what the results have been divided by
    scale: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    splits: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
    whole: tl.constexpr,
) -> None:
    # KV heads are neighbours in memory, so they come first: those of one sequence run side by side.
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    share = tokens_of_split(length, splits, tile)
    first, end = split * share, tl.minimum(split * share + share, length)
    if not whole and first >= length:
        return  # `combine_splits` does not ask for it

    member, dims = tl.arange(0, rows), tl.arange(0, padded_dim)
    heads = kv_head * group + member
    inside = (member < group)[:, None] & (dims < head_dim)[None, :]
    own = tl.load(
        queries + sequence.to(tl.int64) * row_stride + heads[:, None] * head_dim + dims[None, :], mask=inside, other=0.0
    )
    peaks, totals, sums = nothing(rows, padded_dim)
    table = tables + sequence.to(tl.int64) * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride
    for token in range(first, end, tile):
        peaks, totals, sums = absorb(
            *(own, peaks, totals, sums, keys, values, table, token, end, member, scale, block_stride, token_stride),
            *(head_dim, padded_dim, block_size, tile, True, False),
        )

    places = (sequence.to(tl.int64) * tl.num_programs(0) * group + heads) * splits + split
    average = sums / tl.where(totals > 0, totals, 1.0)[:, None]
    tl.store(results + places[:, None] * head_dim + dims[None, :], average.to(results.dtype.element_ty), mask=inside)
    if not whole:
        tl.store(marks + places, peaks + tl.log2(totals), mask=member < group)


@jit
def tokens_of_split(length: tl.tensor, splits: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Whole tiles, so that only a sequence's last one is cut."""
    return tl.cdiv(tl.cdiv(length, splits), tile) * tile


@jit_for_any("splits")
def combine_splits(
    partial: tl.tensor,  # [sequences, heads, splits, head_dim]
    marks: tl.tensor,  # [sequences, heads, splits]
    lengths: tl.tensor,
    results: tl.tensor,  # [sequences, heads, head_dim]
    splits: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile: tl.constexpr,
    padded_splits: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    length = tl.load(lengths + sequence)
    used = tl.cdiv(length, tl.maximum(tokens_of_split(length, splits, tile), 1))
    row = sequence.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, dims = tl.arange(0, padded_splits), tl.arange(0, padded_dim)
    inside = (split < used)[:, None] & (dims < head_dim)[None, :]
    logs = tl.load(marks + row * splits + split, mask=split < used, other=float("-inf"))
    peak = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(used > 0, peak, 0.0))
    rows = tl.load(partial + (row * splits + split)[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
    average = tl.sum(rows * weights[:, None], axis=0) / tl.where(used > 0, tl.sum(weights, axis=0), 1.0)
    tl.store(results + row * head_dim + dims, average.to(results.dtype.element_ty), mask=dims < head_dim)


@jit_for_any("decoding", "table_stride")
def prefill_tile(
    queries: tl.tensor,  # from the row `decoding` on, and so are the results
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    starts: tl.tensor,
    results: tl.tensor,
    scale: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    decoding: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    kv_head, sequence = tl.program_id(1), tl.program_id(2) + decoding
    begin, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    tokens = tl.load(starts + sequence + 1) - begin
    number = tl.cdiv(tokens * group, rows) - 1 - tl.program_id(0)  # the last tile sees most, and begins first
    if number < 0:
        return

    # row of the tile -> packed row, token * group + member -> row of the step, and head
    packed, dims = number * rows + tl.arange(0, rows), tl.arange(0, padded_dim)
    row, heads = (begin - decoding + packed // group).to(tl.int64), kv_head * group + packed % group
    inside = (packed < tokens * group)[:, None] & (dims < head_dim)[None, :]
    own = tl.load(
        queries + row[:, None] * row_stride + heads[:, None] * head_dim + dims[None, :], mask=inside, other=0.0
    )
    # Rows see the tokens up to their own:   0 ...... lowest ...... highest ... length
    #                                        | by all  | by some      |
    positions = length - tokens + packed // group
    lowest = length - tokens + number * rows // group
    highest = length - tokens + (number * rows + rows - 1) // group
    by_all = tl.maximum(tl.minimum(lowest + 1, length), 0) // tile * tile
    end = tl.minimum(highest + 1, length)

    peaks, totals, sums = nothing(rows, padded_dim)
    table = tables + sequence.to(tl.int64) * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride
    for token in range(0, by_all, tile):
        peaks, totals, sums = absorb(
            *(own, peaks, totals, sums, keys, values, table, token, end, positions, scale, block_stride, token_stride),
            *(head_dim, padded_dim, block_size, tile, False, False),
        )
    for token in range(by_all, end, tile):
        peaks, totals, sums = absorb(
            *(own, peaks, totals, sums, keys, values, table, token, end, positions, scale, block_stride, token_stride),
            *(head_dim, padded_dim, block_size, tile, True, True),
        )

    average = sums / tl.where(totals > 0, totals, 1.0)[:, None]
    # Results are contiguous: [rows, heads, head_dim], and there are as many KV heads as programs on this axis.
    places = (row * (tl.num_programs(1) * group) + heads)[:, None] * head_dim + dims[None, :]
    tl.store(results + places, average.to(results.dtype.element_ty), mask=inside)


@jit
def nothing(rows: tl.constexpr, padded_dim: tl.constexpr) -> tl.tensor:
    """What rows have before they have seen a token: peak and sum of their scores' weights, and weighted values."""
    peaks = tl.full([rows], float("-inf"), tl.float32)
    return peaks, tl.zeros([rows], tl.float32), tl.zeros([rows, padded_dim], tl.float32)


@jit
def absorb(
    own: tl.tensor,  # [rows, padded_dim]: queries
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    positions: tl.tensor,
    scale: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    last: tl.constexpr,  # tokens of this tile may be behind the end
    causal: tl.constexpr,  # or behind some of the rows
) -> tl.tensor:
    """A tile of tokens into the rows' running softmax."""
    tokens, dims = first + tl.arange(0, tile), tl.arange(0, padded_dim)
    there = tokens < end if last else tokens >= 0
    blocks = load_masked(table + tokens // block_size, there, last)
    places = blocks.to(tl.int64) * block_stride + (tokens % block_size) * token_stride
    inside = there[:, None] & (dims < head_dim)[None, :]
    masked: tl.constexpr = last or head_dim != padded_dim
    seen_keys = load_masked(keys + places[:, None] + dims[None, :], inside, masked)
    scores = tl.dot(own, seen_keys.T, input_precision="ieee") * scale
    if causal:
        scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    if last:
        scores = tl.where(there[None, :], scores, float("-inf"))

    higher = tl.maximum(peaks, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # of rows that have seen nothing yet
    weights, faded = tl.exp2(scores - base[:, None]), tl.exp2(peaks - base)
    seen_values = load_masked(values + places[:, None] + dims[None, :], inside, masked)
    sums = tl.dot(weights.to(seen_values.dtype), seen_values, sums * faded[:, None], input_precision="ieee")
    return higher, totals * faded + tl.sum(weights, axis=1), sums


@jit
def load_masked(pointers: tl.tensor, inside: tl.tensor, masked: tl.constexpr) -> tl.tensor:
    return tl.load(pointers, mask=inside, other=0) if masked else tl.load(pointers)
