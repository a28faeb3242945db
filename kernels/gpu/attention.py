"""Paged attention in Triton: each program has some rows of one KV head, and walks the tokens that these see.

Rows are packed. All query heads of a group read the same keys, so they are rows of one product:

    decode    row = head of the group                       tile of a sequence: its group, filled up to 16 rows
    prefill   row = token * group + head of the group       tiles of a sequence: so many such rows each

A sequence's tokens go by in tiles, and nothing behind its last token is read, of neither the memory nor the tables:
what was never written may be no number, which times zero is no number either.

The tokens before a program are cut into splits where there are too few programs to fill the device, and
`combine_splits` adds up what they make of a row. How many splits there are depends on how many sequences and rows there
are and on how long a sequence may get, on no length: a graph keeps it.
"""

from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from kernels.gpu.jit import jit, jit_for_any, power_of_two
from kernels.paged import Attention, LayerCache
from kernels.tables import TableStep

LOG2_E = 1.4426950408889634  # exp2 is what the hardware has
MIN_ROWS = 16  # of a product
MAX_ROWS = 128
MAX_DIM = 128  # of heads; for larger ones half as many rows
TILE_BYTES = 16384  # of keys, and as many of values: with STAGES, three programs of a decode are on a processor at once
MAX_TILE = 128
STAGES = 5  # a tile goes through two loads, of the table and by it: so two tiles are in flight while one is computed
FEW_STAGES = 3  # for products, where there is little memory for them
ENOUGH_SHARED = 200 * 1024  # bytes, as data centers' have from Hopper on
WAVES = 4  # of programs that decode, for each processor, so that an uneven end costs little
MAX_SPLITS = 64
# Where the host does not know how few sequences decode, at most:
MIXED_SPLITS = 16
MIXED_PROGRAMS = 4096  # most of which may find that there is nothing for them to do
MIXED_PARTS = 4096  # rows times splits
SHORT = 512  # tokens that are not cut for the rows of prompts, of which many read them together
OLDEST = (8, 0)  # compute capability


class Gpu(NamedTuple):
    processors: int
    shared: int  # bytes of memory that the threads of a program share, at most


class TritonAttention(Attention[TableStep]):
    name = "triton"

    def __init__(self, gpu: Gpu | None = None) -> None:
        """None: the one there is."""
        self._gpu = gpu or this_gpu()

    def attend(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        results = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if step.mixed is None:
            self._decode(queries[: step.decoding], cache, step, results[: step.decoding])
            self._prefill(queries[step.decoding :], cache, step, results[step.decoding :])
        else:
            parts = parts_of(results, mixed_splits(len(queries), cache, step))
            launch_decode(queries, cache, step, parts, len(step.lengths))
            launch_prefill(queries, cache, step, parts, prefill_grid(queries, cache, step), self._gpu)
            add_up(parts, results, step)
        return results

    def decode(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        results = torch.empty_like(queries, memory_format=torch.contiguous_format)
        self._decode(queries, cache, step, results)
        return results

    def prefill(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        results = torch.empty_like(queries, memory_format=torch.contiguous_format)
        self._prefill(queries, cache, step, results)
        return results

    def _decode(self, queries: Tensor, cache: LayerCache, step: TableStep, results: Tensor) -> None:
        if len(queries):
            splits = self._splits(WAVES, len(queries), cache)
            parts = parts_of(results, min(splits, -(-step.longest // sizes_of(queries, cache).tile)))
            launch_decode(queries, cache, step, parts, len(queries))
            add_up(parts, results, step)

    def _prefill(self, queries: Tensor, cache: LayerCache, step: TableStep, results: Tensor) -> None:
        if len(queries):
            grid = prefill_grid(queries, cache, step)
            parts = parts_of(results, min(self._splits(1, grid.tiles, cache), -(-step.longest // SHORT)))
            launch_prefill(queries, cache, step, parts, grid, self._gpu)
            add_up(parts, results, step)

    def _splits(self, waves: int, programs: int, cache: LayerCache) -> int:
        """For so many programs of each KV head."""
        return min(MAX_SPLITS, power_of_two(-(-waves * self._gpu.processors // (programs * cache.keys.shape[2]))))


def mixed_splits(rows: int, cache: LayerCache, step: TableStep) -> int:
    programs = len(step.lengths) * cache.keys.shape[2]
    most = min(MIXED_SPLITS, MIXED_PROGRAMS // programs, MIXED_PARTS // rows, -(-step.longest // SHORT))
    return max(1, most)


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
    tables, counts = numbers[:1, None], (1, 0, 0, block_size)
    step = TableStep(numbers[:1], numbers[:1], tables, numbers[1:], numbers, *counts)
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


def this_gpu() -> Gpu:
    properties: Any = torch.cuda.get_device_properties()  # whose type does not know all of them
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin)


class Parts(NamedTuple):
    """What each split makes of each row. A single one makes the result."""

    averages: Tensor  # [rows, heads, splits, head_dim]
    marks: Tensor  # [rows, heads, splits]: log2 of what they have been divided by; of nothing, -infinity
    splits: int

    @property
    def whole(self) -> bool:
        return self.splits == 1


def parts_of(results: Tensor, splits: int) -> Parts:
    if splits == 1:
        return Parts(results, results, 1)
    rows, heads, head_dim = results.shape
    averages = results.new_empty(rows, heads, splits, head_dim, dtype=torch.float32)
    return Parts(averages, results.new_empty(rows, heads, splits, dtype=torch.float32), splits)


class Grid(NamedTuple):
    tiles: int
    rows: int  # of a tile


def prefill_grid(queries: Tensor, cache: LayerCache, step: TableStep) -> Grid:
    """Wherever sequences begin: each has a tile that is not full, at most."""
    group, padded_dim = sizes_of(queries, cache)[1:3]
    rows = prefill_rows(step.longest_prefill * group, padded_dim, queries.dtype)
    prompts = len(step.lengths) - step.decoding if step.mixed is None else step.mixed.prompts
    return Grid(len(queries) * group // rows + prompts, rows)


def launch_decode(queries: Tensor, cache: LayerCache, step: TableStep, parts: Parts, sequences: int) -> None:
    """Of these first sequences, those that decode."""
    sizes, head_dim = sizes_of(queries, cache), queries.shape[2]
    decode_split[sizes.kv_heads, sequences, parts.splits](
        *(queries, *cache, step.tables, step.lengths, step.mixed and step.mixed.decoding, parts.averages, parts.marks),
        *(head_dim**-0.5 * LOG2_E, queries.stride(0), *cache.keys.stride()[:3], step.tables.stride(0), parts.splits),
        *(sizes.group, head_dim, sizes.padded_dim, cache.keys.shape[1], sizes.tile),
        rows=max(MIN_ROWS, power_of_two(sizes.group)),
        whole=parts.whole,
        **launch_of(queries.dtype, warps=4),
    )


def launch_prefill(queries: Tensor, cache: LayerCache, step: TableStep, parts: Parts, grid: Grid, gpu: Gpu) -> None:
    """Of the sequences behind those that decode; the queries begin there."""
    sizes, head_dim = sizes_of(queries, cache), queries.shape[2]
    prefill_tile[grid.tiles, sizes.kv_heads, parts.splits](
        *(queries, *cache, step.tables, step.lengths, step.starts, step.mixed and step.mixed.decoding),
        *(parts.averages, parts.marks, head_dim**-0.5 * LOG2_E),
        *(queries.stride(0), *cache.keys.stride()[:3], step.tables.stride(0), parts.splits),
        *(step.decoding, step.mixed.prompts if step.mixed else 0, len(step.lengths)),
        *(sizes.group, head_dim, sizes.padded_dim, cache.keys.shape[1], sizes.tile),
        rows=grid.rows,
        whole=parts.whole,
        **launch_of(
            queries.dtype,
            warps=8 if grid.rows == MAX_ROWS or sizes.padded_dim > MAX_DIM else 4,
            stages=STAGES if gpu.shared >= ENOUGH_SHARED else FEW_STAGES,
        ),
    )


def add_up(parts: Parts, results: Tensor, step: TableStep) -> None:
    if not parts.whole:
        rows, heads, head_dim = results.shape
        combine_splits[rows, heads](
            *(parts.averages, parts.marks, step.starts if step.mixed else None, results),
            *(parts.splits, len(step.lengths)),
            *(head_dim, max(16, power_of_two(head_dim)), power_of_two(parts.splits)),
        )


def prefill_rows(longest: int, padded_dim: int, dtype: torch.dtype) -> int:
    """Of a tile: few sizes, for each is compiled."""
    if dtype == torch.float32 or longest <= MIN_ROWS:
        return MIN_ROWS
    return MAX_ROWS if longest > MAX_ROWS // 2 and padded_dim <= MAX_DIM else MAX_ROWS // 2


def launch_of(dtype: torch.dtype, warps: int, stages: int = STAGES) -> dict[str, int]:
    """Products in float32, which is not rounded for the matrix units, are done in registers: more warps have more."""
    return {"num_warps": 8, "num_stages": 3} if dtype == torch.float32 else {"num_warps": warps, "num_stages": stages}


# ---- kernels


@jit_for_any("splits", "table_stride")
def decode_split(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    decoders: tl.tensor,  # or None: all sequences there are programs for decode
    averages: tl.tensor,
    marks: tl.tensor,
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
    if decoders is not None and sequence >= tl.load(decoders):
        return
    length = tl.load(lengths + sequence)
    first, end = bounds_of_split(split, splits, length, tile)
    member, dims = tl.arange(0, rows), tl.arange(0, padded_dim)
    heads = kv_head * group + member
    if not whole and first >= end:
        places = (sequence.to(tl.int64) * tl.num_programs(0) * group + heads) * splits + split
        mark_nothing(marks + places, member < group, rows)
        return

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

    totals = tl.where(totals > 0, totals, 1.0)  # of rows that have seen nothing: their peaks say so
    average = sums / totals[:, None]
    places = (sequence.to(tl.int64) * tl.num_programs(0) * group + heads) * splits + split
    tl.store(averages + places[:, None] * head_dim + dims[None, :], average.to(averages.dtype.element_ty), mask=inside)
    if not whole:
        tl.store(marks + places, peaks + tl.log2(totals), mask=member < group)


@jit_for_any("splits", "table_stride", "decoding", "prompts", "sequences")
def prefill_tile(
    queries: tl.tensor,  # from the row `decoding` on, and so are averages and marks
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    starts: tl.tensor,
    decoders: tl.tensor,  # or None
    averages: tl.tensor,
    marks: tl.tensor,
    scale: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    splits: tl.tensor,
    decoding: tl.tensor,  # sequences that are others' work
    prompts: tl.tensor,  # behind the `decoders`, at most
    sequences: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
    whole: tl.constexpr,
) -> None:
    kv_head, split = tl.program_id(1), tl.program_id(2)
    first_row = decoding
    if decoders is not None:
        decoding = tl.load(decoders)
        sequences = tl.minimum(decoding + prompts, sequences)
    sequence = sequence_of_tile(tl.program_id(0), starts, decoding, sequences, group, rows)
    begin, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    tokens = tl.load(starts + sequence + 1) - begin
    own_tile = tl.program_id(0) - first_tile(begin, sequence, decoding, group, rows)
    number = tl.cdiv(tokens * group, rows) - 1 - own_tile  # the last tile sees most, and begins first
    if number < 0:
        return

    # row of the tile -> packed row, token * group + member -> row of the step, and head
    packed, dims = number * rows + tl.arange(0, rows), tl.arange(0, padded_dim)
    row, heads = (begin - first_row + packed // group).to(tl.int64), kv_head * group + packed % group
    there = packed < tokens * group
    # Rows see the tokens up to their own:   0 ...... lowest ...... highest ... length
    #                                        | by all  | by some      |
    positions = length - tokens + packed // group
    lowest = length - tokens + number * rows // group
    highest = length - tokens + (number * rows + rows - 1) // group
    first, end = bounds_of_split(split, splits, tl.minimum(highest + 1, length), tile)
    if not whole and first >= end:
        places = (row * tl.num_programs(1) * group + heads) * splits + split
        mark_nothing(marks + places, there, rows)
        return

    inside = there[:, None] & (dims < head_dim)[None, :]
    own = tl.load(
        queries + row[:, None] * row_stride + heads[:, None] * head_dim + dims[None, :], mask=inside, other=0.0
    )
    by_all = tl.maximum(tl.minimum(lowest + 1, end), first) // tile * tile
    peaks, totals, sums = nothing(rows, padded_dim)
    table = tables + sequence.to(tl.int64) * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride
    for token in range(first, by_all, tile):
        peaks, totals, sums = absorb(
            *(own, peaks, totals, sums, keys, values, table, token, end, positions, scale, block_stride, token_stride),
            *(head_dim, padded_dim, block_size, tile, False, False),
        )
    for token in range(by_all, end, tile):
        peaks, totals, sums = absorb(
            *(own, peaks, totals, sums, keys, values, table, token, end, positions, scale, block_stride, token_stride),
            *(head_dim, padded_dim, block_size, tile, True, True),
        )

    totals = tl.where(totals > 0, totals, 1.0)  # of rows that have seen nothing: their peaks say so
    average = sums / totals[:, None]
    # There are as many KV heads as programs on this axis.
    places = (row * tl.num_programs(1) * group + heads) * splits + split
    tl.store(averages + places[:, None] * head_dim + dims[None, :], average.to(averages.dtype.element_ty), mask=inside)
    if not whole:
        tl.store(marks + places, peaks + tl.log2(totals), mask=there)


@jit_for_any("splits", "sequences")
def combine_splits(
    averages: tl.tensor,
    marks: tl.tensor,
    starts: tl.tensor,  # or None: there are only rows that belong to a sequence
    results: tl.tensor,  # [rows, heads, head_dim]
    splits: tl.tensor,
    sequences: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_splits: tl.constexpr,
) -> None:
    if starts is not None and tl.program_id(0) >= tl.load(starts + sequences):
        return
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, dims = tl.arange(0, padded_splits), tl.arange(0, padded_dim)
    logs = tl.load(marks + row * splits + split, mask=split < splits, other=float("-inf"))
    peak = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, axis=0)
    inside = (logs > float("-inf"))[:, None] & (dims < head_dim)[None, :]
    parts = tl.load(averages + (row * splits + split)[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
    average = tl.sum(parts * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(results + row * head_dim + dims, average.to(results.dtype.element_ty), mask=dims < head_dim)


@jit
def first_tile(
    begin: tl.tensor, sequence: tl.tensor, decoding: tl.tensor, group: tl.constexpr, rows: tl.constexpr
) -> tl.tensor:
    """Of a sequence: those before it may have so many, each with one that is not full."""
    return (begin - decoding) * group // rows + sequence - decoding


@jit
def sequence_of_tile(
    number: tl.tensor,
    starts: tl.tensor,
    decoding: tl.tensor,
    sequences: tl.tensor,
    group: tl.constexpr,
    rows: tl.constexpr,
) -> tl.tensor:
    """The last one whose tiles do not begin behind this one."""
    low, high = decoding, sequences
    while high - low > 1:
        middle = (low + high) // 2
        before = first_tile(tl.load(starts + middle), middle, decoding, group, rows) <= number
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@jit
def bounds_of_split(split: tl.tensor, splits: tl.tensor, tokens: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Whole tiles, so that only the last one is cut."""
    share = tl.cdiv(tl.cdiv(tokens, splits), tile) * tile
    return split * share, tl.minimum(split * share + share, tokens)


@jit
def mark_nothing(marks: tl.tensor, there: tl.tensor, rows: tl.constexpr) -> None:
    tl.store(marks, tl.full([rows], float("-inf"), tl.float32), mask=there)


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
