"""Attention on a CPU: gathers each sequence's KV from its slots and computes the sequence's rows against it.

In float32 a row's result is the same to the last bit, whatever chunk or batch it stands in and whatever of its KV came
from the cache (decision 0009). Three rules make it so, and whoever edits `exact` keeps them:

1.  A matrix product has at least MIN_ROWS rows: below, MKL takes other kernels, which add in another order.
2.  Sums over tokens go partition by partition, PARTITION tokens each from the sequence's start, in this order, because
    MKL cuts long sums in parts that depend on how many rows there are: from 256 on where AMD has AVX-512, above 384 on
    Intel. Within a partition zeros behind the last token change nothing; whole GRAINs of them are left out.
3.  The scores' maximum is of all tokens the row sees: a running one would depend on the partitions.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.contexts import Context, ContextStep, Place
from kernels.paged import Attention, LayerCache

MIN_ROWS = 16
PARTITION = 128
GRAIN = 64
SCORES = 1 << 20  # the scores of one tile; more would fall out of the cache between the passes over them

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class CpuAttention(Attention[ContextStep]):
    name = "cpu"

    def attend(self, queries: Tensor, cache: LayerCache, step: ContextStep) -> Tensor:
        attend = exact if queries.dtype == torch.float32 else fused
        chunks = queries.split([context.tokens for context in step.contexts])
        rows = [attend(chunk, cache, context) for chunk, context in zip(chunks, step.contexts, strict=True)]
        return torch.cat(rows) if len(rows) > 1 else rows[0]


# ---- float32, the same to the last bit


def exact(queries: Tensor, cache: LayerCache, context: Context) -> Tensor:
    """Attention of one sequence's rows, [rows, heads, head_dim]."""
    rows, heads, head_dim = queries.shape
    kv_heads = cache.keys.shape[2]
    queries = (queries * head_dim**-0.5).view(rows, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
    tile = min(128, max(MIN_ROWS, SCORES // (heads * context.length)))
    # Several tiles gather once; a single one does so partition by partition, each of which is still in the cache then.
    keys, values = (Whole(memory, context) if rows > tile else Piecewise(memory, context) for memory in cache)
    result = queries.new_empty(rows, kv_heads, heads // kv_heads, head_dim)
    for first in range(0, rows, tile):
        last = min(first + tile, rows)
        result[first:last] = _tile(queries[:, first:last], keys, values, context.start + first).transpose(0, 1)
    return result.view(rows, heads, head_dim)


class Piecewise:
    """One sequence's keys or values, gathered from its slots; a partition is valid until the next one is read."""

    def __init__(self, memory: Tensor, context: Context) -> None:
        self._memory = memory.flatten(0, 1)
        self._slots = context.slots
        self._gathered = memory.new_empty(min(PARTITION, _grains(context.length)), *memory.shape[2:])

    def partition(self, begin: int, end: int) -> Tensor:
        """The tokens from `begin` to `end`, [kv_heads, tokens, head_dim], with zeros behind the sequence's last."""
        slots = self._slots[begin:end]
        torch.index_select(self._memory, 0, slots, out=self._gathered[: len(slots)])
        self._gathered[len(slots) : end - begin] = 0
        return self._gathered[: end - begin].transpose(0, 1)


class Whole:
    """All of one sequence's keys or values, gathered at once."""

    def __init__(self, memory: Tensor, context: Context) -> None:
        self._gathered = memory.new_empty(_grains(context.length), *memory.shape[2:])
        torch.index_select(memory.flatten(0, 1), 0, context.slots, out=self._gathered[: context.length])
        self._gathered[context.length :] = 0

    def partition(self, begin: int, end: int) -> Tensor:
        return self._gathered[begin:end].transpose(0, 1)


def _tile(queries: Tensor, keys: Piecewise | Whole, values: Piecewise | Whole, start: int) -> Tensor:
    """Attention of rows, [kv_heads, rows, group, head_dim]; the first row is the token `start`."""
    kv_heads, rows, group, head_dim = queries.shape
    matrix = queries.reshape(kv_heads, rows * group, head_dim)
    missing = max(0, MIN_ROWS - rows * group)
    if missing:
        matrix = functional.pad(matrix, (0, 0, 0, missing))
    visible = _grains(start + rows)
    partitions = [(begin, min(begin + PARTITION, visible)) for begin in range(0, visible, PARTITION)]
    scores = matrix.new_empty(kv_heads, matrix.shape[1], visible)
    for begin, end in partitions:
        scores[:, :, begin:end] = torch.bmm(matrix, keys.partition(begin, end).transpose(1, 2))
    # Hide the tokens after each row's own.
    if rows == 1:
        scores[:, :, start + 1 :] = -torch.inf
    else:
        seen_by_all = (start + 1) // GRAIN * GRAIN
        positions = torch.arange(start, start + rows).repeat_interleave(group)
        positions = functional.pad(positions, (0, missing), value=start)
        hidden = torch.arange(seen_by_all, visible) > positions[:, None]
        scores[:, :, seen_by_all:].masked_fill_(hidden, -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    result, total = torch.zeros_like(matrix), matrix.new_zeros(())
    for begin, end in partitions:
        part = scores[:, :, begin:end]
        result.baddbmm_(part, values.partition(begin, end))
        # Row sums, [kv_heads, rows, 1], always over the same numbers of grains, so that rounding does not vary.
        grains = part.unflatten(-1, (-1, GRAIN)).sum(-1)
        total = total + functional.pad(grains, (0, PARTITION // GRAIN - grains.shape[2])).sum(-1, keepdim=True)
    return (result / total)[:, : rows * group].view(kv_heads, rows, group, head_dim)


def _grains(tokens: int) -> int:
    return -(-tokens // GRAIN) * GRAIN


# ---- 16 bits, as fast as torch can


def fused(queries: Tensor, cache: LayerCache, context: Context) -> Tensor:
    """torch's own attention, to what all rows see and to the rows themselves; it takes no mask as fast as none."""
    rows, heads, head_dim = queries.shape
    kv_heads = cache.keys.shape[2]
    grouped = queries.view(rows, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
    parts: list[tuple[Tensor, Tensor]] = []  # [kv_heads, rows, group, head_dim], and the logarithms of the sums
    if context.seen:
        matrix = grouped.reshape(1, kv_heads, -1, head_dim)  # rows that share a KV head are rows of one product
        for place in context.seen:
            attended, sums = _flash(matrix, *(_at(memory, place)[None] for memory in cache))
            parts.append((attended.view(grouped.shape), sums.view(grouped.shape[:3])))
    if rows > 1:
        spread = (_at(memory, context.own)[:, None].expand(-1, grouped.shape[2], -1, -1) for memory in cache)
        attended, sums = _flash(grouped.transpose(1, 2), *spread, is_causal=True)
        parts.append((attended.transpose(1, 2), sums.transpose(1, 2)))
    result = parts[0][0]
    if len(parts) > 1:  # each part counts by its share of the sum
        shares = torch.stack([sums for _, sums in parts]).softmax(0).unsqueeze(-1)
        result = torch.stack([attended for attended, _ in parts]).mul(shares).sum(0).to(result.dtype)
    return result.transpose(0, 1).reshape(rows, heads, head_dim)


def _at(memory: Tensor, place: Place) -> Tensor:
    """[kv_heads, tokens, head_dim], where it lies if that is one place."""
    slots = memory.flatten(0, 1)
    found = slots[place] if isinstance(place, slice) else slots.index_select(0, place)
    return found.transpose(0, 1)
