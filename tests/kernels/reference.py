"""The specification of attention: one token, one head at a time, in float64. Slow; the other backends must equal it."""

import torch
from torch import Tensor

from kernels.contexts import Context, ContextStep
from kernels.paged import Attention, LayerCache


class ReferenceAttention(Attention[ContextStep]):
    name = "reference"

    def attend(self, queries: Tensor, cache: LayerCache, step: ContextStep) -> Tensor:
        tokens = [(context, position) for context in step.contexts for position in range(context.start, context.length)]
        return torch.stack([attend_one(row, cache, *token) for row, token in zip(queries, tokens, strict=True)])


def attend_one(query: Tensor, cache: LayerCache, context: Context, position: int) -> Tensor:
    """Attend one row, [heads, head_dim], to its sequence's KV up to and including `position`."""
    slots = context.slots[: position + 1]
    keys, values = (memory.flatten(0, 1)[slots].double() for memory in cache)  # [tokens, kv_heads, head_dim]
    group = query.shape[0] // keys.shape[1]  # query heads per KV head
    attended = []
    for head, own in enumerate(query.double()):
        scores = keys[:, head // group] @ own / query.shape[1] ** 0.5
        attended.append(scores.softmax(0) @ values[:, head // group])
    return torch.stack(attended).to(query.dtype)
