"""Attention over block tables in plain torch and float32: slow, for any device, with shapes that no length changes.

It is the last resort of a GPU without Triton, and stands in for the others where there is no GPU. Rows see as many
tokens as they may: all else is masked before it is computed with, for what was never written may be no number.
"""

import torch
from torch import Tensor

from kernels.paged import Attention, LayerCache
from kernels.tables import TableStep

ROWS = 64  # and
TOKENS = 256  # that are gathered at once: 64 MB of keys of 8 heads of 128


class PlainAttention(Attention[TableStep]):
    name = "torch"

    def decode(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        return _attended(queries, cache, step.tables[: step.decoding], step.lengths[: step.decoding], step.longest)

    def prefill(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        starts, lengths = step.starts[step.decoding :], step.lengths[step.decoding :]
        rows = torch.arange(step.decoding, step.decoding + len(queries), device=queries.device, dtype=starts.dtype)
        sequences = (torch.searchsorted(starts, rows, right=True) - 1).clamp(max=len(lengths) - 1)
        visible = lengths[sequences] - (starts[sequences + 1] - 1 - rows).clamp(min=0)
        return _attended(queries, cache, step.tables[step.decoding :][sequences], visible, step.longest)


def _attended(queries: Tensor, cache: LayerCache, tables: Tensor, visible: Tensor, longest: int) -> Tensor:
    """Attend each row to the visible first tokens of its own table."""
    tiles = [slice(first, first + ROWS) for first in range(0, len(queries), ROWS)]
    return torch.cat([_tile(queries[tile], cache, tables[tile], visible[tile], longest) for tile in tiles])


def _tile(queries: Tensor, cache: LayerCache, tables: Tensor, visible: Tensor, longest: int) -> Tensor:
    rows, heads, head_dim = queries.shape
    block_size, kv_heads = cache.keys.shape[1:3]
    own = (queries.float() * head_dim**-0.5).view(rows, kv_heads, heads // kv_heads, head_dim)
    peaks = own.new_full((*own.shape[:3], 1), -torch.inf)
    totals, sums = torch.zeros_like(peaks), torch.zeros_like(own)
    for first in range(0, longest, TOKENS):
        tokens = torch.arange(first, min(first + TOKENS, longest), device=queries.device)
        hidden = tokens >= visible[:, None]
        slots = tables[:, tokens // block_size].masked_fill(hidden, 0).long(), tokens % block_size
        keys, values = (memory[slots].float().masked_fill(hidden[:, :, None, None], 0) for memory in cache)
        scores = torch.einsum("rkgd,rtkd->rkgt", own, keys).masked_fill(hidden[:, None, None], -torch.inf)
        higher = torch.maximum(peaks, scores.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -torch.inf, 0)  # of rows that have seen nothing
        weights, faded = (scores - base).exp(), (peaks - base).exp()
        totals = totals * faded + weights.sum(-1, keepdim=True)
        sums = sums * faded + torch.einsum("rkgt,rtkd->rkgd", weights, values)
        peaks = higher
    return (sums / totals.masked_fill(totals == 0, 1)).view(rows, heads, head_dim).to(queries.dtype)
