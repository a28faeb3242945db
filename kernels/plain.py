"""Attention over block tables in plain torch and float32: slow, for any device, with shapes that no length changes.

It is the last resort of a GPU without Triton, and stands in for the others where there is no GPU. Rows see as many
tokens as they may: all else is masked before it is computed with, for what was never written may be no number.
"""

import torch
from torch import Tensor

from kernels.paged import Attention, LayerCache
from kernels.tables import TableStep

ROWS = 64  # and
TOKENS = 256  # a gather takes this many: 64 MB of keys of 8 heads of 128


class PlainAttention(Attention[TableStep]):
    name = "torch"

    def attend(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        rows = torch.arange(len(queries), device=queries.device, dtype=step.starts.dtype)
        sequences = (torch.searchsorted(step.starts, rows, right=True) - 1).clamp(max=len(step.lengths) - 1)
        visible = step.lengths[sequences] - (step.starts[sequences + 1] - 1 - rows).clamp(min=0)
        attended = []
        for first in range(0, len(queries), ROWS):
            tile = slice(first, first + ROWS)
            tables = step.tables[sequences[tile]]
            attended.append(attend_tile(queries[tile], cache, tables, visible[tile], step.longest))
        return torch.cat(attended)


def attend_tile(queries: Tensor, cache: LayerCache, tables: Tensor, visible: Tensor, longest: int) -> Tensor:
    """Attend each row to the visible first tokens of its own table."""
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
        base = higher.masked_fill(higher == -torch.inf, 0)  # rows that have seen nothing have none
        weights, faded = (scores - base).exp(), (peaks - base).exp()
        totals = totals * faded + weights.sum(-1, keepdim=True)
        sums = sums * faded + torch.einsum("rkgt,rtkd->rkgd", weights, values)
        peaks = higher
    return (sums / totals.masked_fill(totals == 0, 1)).view(rows, heads, head_dim).to(queries.dtype)
