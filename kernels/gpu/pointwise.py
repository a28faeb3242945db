"""The steps between matrix products and attention in Triton, each of them one launch.

Programs treat rows alone, and compute in float32 whatever the type. What torch rounds on its way to a result that is
kept is rounded here, too: the sum of a residual, and a head before it is turned.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapters import Table, Tiles
from kernels.gpu.adapters import adapt
from kernels.gpu.jit import jit, jit_for_any, power_of_two
from kernels.paged import LayerCache, Step
from kernels.pointwise import Heads, Pointwise
from kernels.spans import Copy

HEADS = 8  # a program's heads: with one, a long prompt's programs would take longer to start than to run
COLUMNS = 1024  # a program's columns


class TritonPointwise(Pointwise):
    name = "triton"
    adapts_in_graphs = True

    def add_norm(self, rows: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        count, width = rows.shape
        normed = torch.empty_like(rows)
        padded = power_of_two(width)
        warps = min(max(padded // 512, 4), 16)
        if count:
            add_norm_row[(count,)](rows, delta, weight, normed, eps, rows.stride(0), width, padded, num_warps=warps)
        return rows, normed

    def swiglu(self, gate_up: Tensor) -> Tensor:
        count, width = gate_up.shape[0], gate_up.shape[1] // 2
        result = gate_up.new_empty(count, width)
        if count:
            swiglu_part[count, triton.cdiv(width, COLUMNS)](gate_up, result, gate_up.stride(0), width, COLUMNS)
        return result

    def turn_and_store(self, qkv: Tensor, heads: Heads, turn: Tensor, cache: LayerCache, step: Step) -> Tensor:
        tiles = triton.cdiv(heads.queries, HEADS), triton.cdiv(heads.keys, HEADS)
        half = heads.head_dim // 2
        if len(qkv):
            turn_and_store_heads[len(qkv), tiles[0] + 2 * tiles[1]](
                *(qkv, *(heads.norms or (None, None)), turn, *cache, step.slots, heads.eps, qkv.stride(0)),
                *(*cache.keys.stride()[:2], heads.queries, heads.keys, half, power_of_two(half), cache.keys.shape[1]),
                HEADS,
                num_warps=4,
            )
        queries: Tensor = qkv[:, : heads.queries * heads.head_dim].unflatten(1, (heads.queries, heads.head_dim))
        return queries

    def adapt(self, inputs: Tensor, product: Tensor, table: Table, tiles: Tiles, room: int) -> None:
        adapt(inputs, product, table, tiles, room)

    def copy(self, caches: Sequence[LayerCache], copies: Sequence[Copy]) -> None:
        if not copies:
            return
        keys = caches[0].keys
        listed = torch.tensor(copies, dtype=torch.int32, pin_memory=keys.is_cuda).to(keys.device, non_blocking=True)
        for first, layers, stride in evenly_spaced(caches):
            token = keys.stride(1)
            copy_places[2 * layers, triton.cdiv(keys.shape[1] * token, COLUMNS)](
                *(first.keys, listed, len(copies), stride, distance(first.keys, first.values), keys.stride(0)),
                *(token, COLUMNS),
            )


def evenly_spaced(caches: Sequence[LayerCache]) -> list[tuple[LayerCache, int, int]]:
    """Groups of equally spaced layers: the first layer, their number, and their distance."""
    if len(caches) == 1:
        return [(caches[0], 1, 0)]
    strides = {distance(one, other) for pair in pairwise(caches) for one, other in zip(*pair, strict=True)}
    if len(strides) == 1:
        return [(caches[0], len(caches), strides.pop())]
    return [(cache, 1, 0) for cache in caches]


def distance(one: Tensor, other: Tensor) -> int:
    """The distance of two tensors, in elements."""
    return (other.data_ptr() - one.data_ptr()) // one.itemsize


# ---- kernels


@jit
def add_norm_row(
    rows: tl.tensor,
    delta: tl.tensor,  # or None
    weight: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    row_stride: tl.tensor,
    width: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    inside = columns < width
    total = tl.load(rows + row * row_stride + columns, mask=inside, other=0.0)
    if delta is not None:
        added = tl.load(delta + row * width + columns, mask=inside, other=0.0)
        total = (total.to(tl.float32) + added.to(tl.float32)).to(total.dtype)
        tl.store(rows + row * row_stride + columns, total, mask=inside)
    exact = total.to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = exact * tl.rsqrt(tl.sum(exact * exact, axis=0) / width + eps) * factors
    tl.store(normed + row * width + columns, result.to(total.dtype), mask=inside)


@jit
def swiglu_part(
    gate_up: tl.tensor, result: tl.tensor, row_stride: tl.tensor, width: tl.constexpr, columns: tl.constexpr
) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + width + column, mask=inside, other=0.0)
    exact = gate.to(tl.float32)
    silu = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype).to(tl.float32)
    tl.store(result + row * width + column, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


@jit
def turn_and_store_heads(
    qkv: tl.tensor,
    query_norm: tl.tensor,  # or None
    key_norm: tl.tensor,
    turn: tl.tensor,  # [rows, 2, half]: cosines and sines
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    eps: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    query_heads: tl.constexpr,
    key_heads: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    block_size: tl.constexpr,
    heads: tl.constexpr,
) -> None:
    # A row of qkv:     | query heads ...   | key heads ... | value heads ... |     head = | first half | second half |
    # its programs:     | 0 ... query_tiles | ... key_tiles | ... key_tiles   |
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_tiles: tl.constexpr = (query_heads + heads - 1) // heads
    key_tiles: tl.constexpr = (key_heads + heads - 1) // heads
    dims = tl.arange(0, padded_half)
    head, heads_before, heads_here = tile * heads + tl.arange(0, heads), 0, query_heads
    if tile >= query_tiles + key_tiles:
        head, heads_before, heads_here = head - (query_tiles + key_tiles) * heads, query_heads + key_heads, key_heads
    elif tile >= query_tiles:
        head, heads_before, heads_here = head - query_tiles * heads, query_heads, key_heads

    inside = (head < heads_here)[:, None] & (dims < half)[None, :]
    places = qkv + row * row_stride + ((heads_before + head) * (2 * half))[:, None] + dims[None, :]
    first = tl.load(places, mask=inside, other=0.0)
    second = tl.load(places + half, mask=inside, other=0.0)
    slot = tl.load(slots + row)
    memory = (slot // block_size) * block_stride + (slot % block_size) * token_stride
    targets = memory + (head * (2 * half))[:, None] + dims[None, :]
    if tile >= query_tiles + key_tiles:
        tl.store(values + targets, first, mask=inside)
        tl.store(values + targets + half, second, mask=inside)
    else:
        weights = query_norm
        if query_norm is not None:
            weights = tl.where(tile >= query_tiles, key_norm, query_norm)
        left, right = turned(first, second, weights, turn + row * (2 * half), eps, half, padded_half)
        if tile >= query_tiles:
            tl.store(keys + targets, left, mask=inside)
            tl.store(keys + targets + half, right, mask=inside)
        else:
            tl.store(places, left, mask=inside)
            tl.store(places + half, right, mask=inside)


@jit
def turned(
    first: tl.tensor,
    second: tl.tensor,
    weights: tl.tensor,  # or None
    turn: tl.tensor,
    eps: tl.tensor,
    half: tl.constexpr,
    padded_half: tl.constexpr,
) -> tl.tensor:
    """Normalize (if there is a norm) and rotate heads given in halves, [heads, padded_half] each."""
    left, right = first.to(tl.float32), second.to(tl.float32)
    if weights is not None:
        factor = tl.rsqrt(tl.sum(left * left + right * right, axis=1) / (2 * half) + eps)[:, None]
        left = (left * factor * half_of(weights, half, padded_half)).to(first.dtype).to(tl.float32)
        right = (right * factor * half_of(weights + half, half, padded_half)).to(first.dtype).to(tl.float32)
    cosines, sines = half_of(turn, half, padded_half), half_of(turn + half, half, padded_half)
    return (left * cosines - right * sines).to(first.dtype), (right * cosines + left * sines).to(first.dtype)


@jit
def half_of(numbers: tl.tensor, half: tl.constexpr, padded_half: tl.constexpr) -> tl.tensor:
    """Load [1, padded_half] in float32."""
    dims = tl.arange(0, padded_half)
    return tl.load(numbers + dims, mask=dims < half, other=0.0).to(tl.float32)[None, :]


@jit_for_any("count")
def copy_places(
    memory: tl.tensor,  # the first layer's keys
    copies: tl.tensor,  # [copies, 3]: source, target, tokens
    count: tl.tensor,
    layer_stride: tl.tensor,
    to_values: tl.tensor,
    block_stride: tl.tensor,
    token: tl.constexpr,  # the places of one
    columns: tl.constexpr,
) -> None:
    # Each lane has the same places of all blocks and takes the copies in their order. A block that is a source may be
    # a later copy's target: the lane has read its places then.
    layer, place = tl.program_id(0) // 2, tl.program_id(1) * columns + tl.arange(0, columns)
    memory += layer.to(tl.int64) * layer_stride + (tl.program_id(0) % 2).to(tl.int64) * to_values
    for number in range(count):
        source = tl.load(copies + 3 * number).to(tl.int64) * block_stride
        target = tl.load(copies + 3 * number + 1).to(tl.int64) * block_stride
        inside = place < tl.load(copies + 3 * number + 2) * token
        tl.store(memory + target + place, tl.load(memory + source + place, mask=inside), mask=inside)
