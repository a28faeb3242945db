"""Paged attention in Triton: the kernels that a step launches, and the share of each program.

Several programs read one sequence where there are too few of them to fill the device, and where the sequence is much
longer than others. A graph keeps the number of programs, so it depends on no length. How those that decode divide the
tokens among them is planned on the device, once in a step.
"""

from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from kernels.gpu.attention_kernels import (
    FIELDS,
    combine_shares,
    combine_splits,
    decode_share,
    plan_shares,
    prefill_tile,
)
from kernels.gpu.jit import power_of_two
from kernels.paged import Attention, KvShape, LayerCache
from kernels.tables import TableStep

LOG2_E = 1.4426950408889634  # exp2 is what the hardware has
MIN_ROWS = 16  # a product's least rows
MAX_ROWS = 128
MAX_DIM = 128  # larger heads have half as many rows
TILE_BYTES = 16384  # of keys, and as many of values: with STAGES, three programs of a decode are on a processor at once
MAX_TILE = 128
STAGES = 5  # a tile goes through two loads, of the table and by it: so two tiles are in flight while one is computed
FEW_STAGES = 3  # products with little memory have these
ENOUGH_SHARED = 200 * 1024  # bytes, as data centers' have from Hopper on
WAVES = 6  # each processor has this many programs that decode, so that an uneven end costs little
FEW, MANY = 32, 256  # sequences whose lengths a program reads at once
MAX_SPLITS = 64
# The most, if the host does not know how few sequences decode:
MIXED_SPLITS = 16
MIXED_PROGRAMS = 4096  # most of which may find that there is nothing for them to do
MIXED_PARTS = 4096  # rows times splits
SHORT = 512  # tokens that are not cut for the rows of prompts, of which many read them together
OLDEST = (8, 0)  # compute capability
TRIED_ROWS = (1, 2, 64, 256)  # one decodes, and tiles of prompts have few rows, more, or as many as they may


class Gpu(NamedTuple):
    processors: int
    shared: int  # bytes of memory that the threads of a program share, at most


class TritonAttention(Attention[TableStep]):
    name = "triton"

    def __init__(self, gpu: Gpu | None = None) -> None:
        """`gpu` defaults to the current device."""
        self._gpu = gpu or this_gpu()

    def plan(self, step: TableStep, cache: LayerCache) -> Tensor | None:
        """The shares of the decoding rows: `plan_shares` says what is in its rows."""
        sequences = decoders_of(step)
        if not sequences:
            return None
        tile = tile_of(cache)
        wanted = -(-WAVES * self._gpu.processors // cache.keys.shape[2])
        possible = sequences * (-(-step.longest // tile) - 1)
        extra = min(wanted, possible)
        plan = step.lengths.new_empty(2 * sequences + extra, FIELDS.value)
        decoders, counted = step.mixed and step.mixed.decoding, FEW if sequences <= FEW else MANY
        plan_shares[(sequences,)](*(step.lengths, decoders, plan, plan[sequences:], sequences, extra, tile, counted))
        return plan

    def attend(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        results = torch.empty_like(queries, memory_format=torch.contiguous_format)
        decoding = step.decoding if step.mixed is None else len(queries)
        plan = self.plan(step, cache) if step.plan is None else step.plan
        if plan is not None:
            sequences = decoders_of(step)
            shares = plan[:sequences], plan[sequences:]
            launch_decode(queries[:decoding], cache, step, results[:decoding], *shares)
        prompts, of_prompts = queries[step.decoding :], results[step.decoding :]
        if len(prompts):
            grid, kv_heads = prefill_grid(prompts, cache, step), cache.keys.shape[2]
            if step.mixed is None:
                most = min(MAX_SPLITS, power_of_two(-(-self._gpu.processors // (grid.tiles * kv_heads))))
            else:
                most = min(MIXED_SPLITS, MIXED_PROGRAMS // (len(step.lengths) * kv_heads), MIXED_PARTS // len(prompts))
            parts = parts_of(of_prompts, max(1, min(most, -(-step.longest // SHORT))))
            launch_prefill(prompts, cache, step, parts, grid, self._gpu)
            add_up(parts, of_prompts, step)
        return results


def decoders_of(step: TableStep) -> int:
    """Sequences that decode, at most."""
    return step.decoding if step.mixed is None else min(step.prefilling, len(step.lengths))


def tried(shape: KvShape, device: str = "cuda") -> TritonAttention:
    """Raise RuntimeError if the device is too old, or if its kernels for such a shape do not compile or start."""
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        raise RuntimeError(
            "Triton's products need compute capability {}.{}; this device has {}.{}".format(*OLDEST, *capability)
        )
    attention = TritonAttention()
    memory = torch.zeros(1, shape.block_size, 1, shape.head_dim, dtype=shape.dtype, device=device)
    try:
        for rows in TRIED_ROWS:
            # So many rows of one sequence, whose tokens all lie in the same block.
            numbers = torch.tensor([0, rows], dtype=torch.int32, device=device)
            tables = torch.zeros(1, -(-rows // shape.block_size), dtype=torch.int32, device=device)
            prefilling, decoding = (rows, 0) if rows > 1 else (0, 1)
            counts = decoding, prefilling, prefilling, tables.shape[1] * shape.block_size
            step = TableStep(numbers[:0], numbers[:0], tables, numbers[1:], numbers, *counts)
            attention.attend(memory.new_zeros(rows, shape.group, shape.head_dim), LayerCache(memory, memory), step)
    except (CalledProcessError, TritonError) as error:
        raise RuntimeError(
            f"Triton cannot compile {shape.dtype} heads of {shape.head_dim}, {shape.group} per KV head: {error}"
        ) from error
    return attention


class Sizes(NamedTuple):
    kv_heads: int
    group: int  # query heads that share a KV head
    padded_dim: int
    tile: int  # tokens


def sizes_of(queries: Tensor, cache: LayerCache) -> Sizes:
    kv_heads, head_dim = cache.keys.shape[2:]
    return Sizes(kv_heads, queries.shape[1] // kv_heads, max(16, power_of_two(head_dim)), tile_of(cache))


def tile_of(cache: LayerCache) -> int:
    padded_dim = max(16, power_of_two(cache.keys.shape[3]))
    return min(MAX_TILE, max(16, TILE_BYTES // (padded_dim * cache.keys.itemsize)))


def this_gpu() -> Gpu:
    properties: Any = torch.cuda.get_device_properties()  # the type does not know all of them
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin)


class Parts(NamedTuple):
    """Partial results of each row, one per split. A single split writes the result itself."""

    averages: Tensor
    marks: Tensor
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
    rows: int  # a tile's rows


def prefill_grid(queries: Tensor, cache: LayerCache, step: TableStep) -> Grid:
    """An upper bound of tiles: each sequence has at most one partial tile."""
    group, padded_dim = sizes_of(queries, cache)[1:3]
    longest, rows = step.longest_prefill * group, MIN_ROWS  # few sizes, because each is compiled
    if queries.dtype != torch.float32 and longest > MIN_ROWS:
        rows = MAX_ROWS if longest > MAX_ROWS // 2 and padded_dim <= MAX_DIM else MAX_ROWS // 2
    prompts = len(step.lengths) - step.decoding if step.mixed is None else step.mixed.prompts
    return Grid(len(queries) * group // rows + prompts, rows)


def launch_decode(
    queries: Tensor, cache: LayerCache, step: TableStep, results: Tensor, of_sequences: Tensor, of_shares: Tensor
) -> None:
    """Launch the decoding rows of the first sequences, in the shares that were planned."""
    sizes, (_, heads, head_dim) = sizes_of(queries, cache), queries.shape
    averages = results.new_empty(len(of_shares), heads, head_dim, dtype=torch.float32)
    marks = results.new_empty(len(of_shares), heads, dtype=torch.float32)
    decode_share[sizes.kv_heads, len(of_shares)](
        *(queries, *cache, step.tables, of_shares, results, averages, marks),
        *(head_dim**-0.5 * LOG2_E, queries.stride(0), *cache.keys.stride()[:3], step.tables.stride(0)),
        *(sizes.group, head_dim, sizes.padded_dim, cache.keys.shape[1], sizes.tile),
        rows=max(MIN_ROWS, power_of_two(sizes.group)),
        **launch_of(queries.dtype, warps=4),
    )
    if len(of_shares) > len(of_sequences):
        combine_shares[len(of_sequences), heads](averages, marks, of_sequences, results, head_dim, sizes.padded_dim)


def launch_prefill(queries: Tensor, cache: LayerCache, step: TableStep, parts: Parts, grid: Grid, gpu: Gpu) -> None:
    """Launch the prefill rows of the sequences behind the decoding ones; `queries` starts there."""
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
            *(parts.averages, parts.marks, step.starts, step.mixed and step.mixed.decoding, results),
            *(parts.splits, len(step.lengths)),
            *(head_dim, max(16, power_of_two(head_dim)), power_of_two(parts.splits)),
        )


def launch_of(dtype: torch.dtype, warps: int, stages: int = STAGES) -> dict[str, int]:
    """Warps of a program: float32 products without rounding run in registers, so they need more warps."""
    return {"num_warps": 8, "num_stages": 3} if dtype == torch.float32 else {"num_warps": warps, "num_stages": stages}
