"""Sequences in paged memory, with blocks in no order and garbage wherever nothing was stored."""

import random
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.contexts import ContextStep
from kernels.paged import Attention, LayerCache
from kernels.pointwise import Pointwise
from kernels.spans import Span


class Shape(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4


class Sequence(NamedTuple):
    """All of one sequence's tokens; some of them are cached already, and `count` of them are the step's rows."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    blocks: list[int]

    def span(self, start: int, count: int) -> Span:
        return Span(self.blocks, start, count)


def sequences(lengths: list[int], shape: Shape, seed: int, dtype: torch.dtype = torch.float32) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    numbers = list(range(blocks_for(lengths, shape.block_size)))
    random.Random(seed).shuffle(numbers)
    made = []
    for length in lengths:
        queries, keys, values = (
            torch.randn(length, heads, shape.head_dim, generator=generator).to(dtype)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        made.append(Sequence(queries, keys, values, [numbers.pop() for _ in range(-(-length // shape.block_size))]))
    return made


def blocks_for(lengths: list[int], block_size: int) -> int:
    return sum(-(-length // block_size) for length in lengths) + 3


def memory(lengths: list[int], shape: Shape, dtype: torch.dtype = torch.float32) -> LayerCache:
    """Unwritten memory reads as NaN."""
    size = (blocks_for(lengths, shape.block_size), shape.block_size, shape.kv_heads, shape.head_dim)
    return LayerCache(torch.full(size, torch.nan, dtype=dtype), torch.full(size, torch.nan, dtype=dtype))


def run(
    attention: Attention[ContextStep], cache: LayerCache, shape: Shape, parts: list[tuple[Sequence, int, int]]
) -> list[Tensor]:
    """One step: for each part the rows of the sequence's tokens from `start` on."""
    step = ContextStep([sequence.span(start, count) for sequence, start, count in parts], shape.block_size)
    queries = torch.cat([sequence.queries[start : start + count] for sequence, start, count in parts])
    keys = torch.cat([sequence.keys[start : start + count] for sequence, start, count in parts])
    values = torch.cat([sequence.values[start : start + count] for sequence, start, count in parts])
    Pointwise().store(keys, values, cache, step)
    return list(attention.attend(queries, cache, step).split([count for _, _, count in parts]))


def computed(
    attention: Attention[ContextStep], sequence: Sequence, shape: Shape, chunks: list[int], cache: LayerCache
) -> Tensor:
    """All rows of one sequence, so many tokens at a time."""
    rows, start = [], 0
    for count in chunks:
        rows += run(attention, cache, shape, [(sequence, start, count)])
        start += count
    return torch.cat(rows)
