"""From logits to tokens for all rows at once without synchronizing the device, for devices without Triton.

A row draws as one does in `replica.runners.sampling` that no client has shaped; only what rounds may fall otherwise.
"""

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # vLLM has this limit for the temperature, too


def draw(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, wheres: Tensor, out: Tensor
) -> None:
    """Write each row's token to `out`, int64. A `top_k` below 1 means all; `wheres` are float64 points in [0, 1)."""
    best = logits.nan_to_num(nan=-torch.inf).argmax(1)
    peaks = logits.amax(1, keepdim=True)
    certain = (temperatures < GREEDY_BELOW) | ~peaks.squeeze(1).isfinite()  # or broken
    ordered = logits.sort(dim=1, descending=True).values
    vocab = logits.shape[1]
    last = torch.where(top_ks > 0, top_ks, vocab).clamp(max=vocab).long() - 1
    cutoffs = ordered.gather(1, last.unsqueeze(1))
    temperatures = temperatures.clamp(min=GREEDY_BELOW).unsqueeze(1)

    def weigh(values: Tensor) -> Tensor:
        weights = ((values.double() - peaks.double()) / temperatures).exp()
        return weights.masked_fill((values < cutoffs) | (weights < min_ps.unsqueeze(1)), 0)

    # Find the smallest weight within `top_p` of the whole.
    largest, top_ps = weigh(ordered), top_ps.unsqueeze(1)
    sums = largest.cumsum(1)
    places = torch.searchsorted(sums, top_ps * sums[:, -1:])
    ends = largest.gather(1, places.clamp(max=vocab - 1)).masked_fill((top_ps >= 1) | (places == vocab), 0)
    weights = weigh(logits)
    weights = weights.masked_fill(weights < ends, 0)
    # Pick the positions whose share of the whole holds these points; their weight is never 0.
    sums = weights.cumsum(1)
    places = torch.searchsorted(sums, wheres.unsqueeze(1) * sums[:, -1:], right=True).clamp(max=vocab - 1)
    last = torch.where(weights > 0, torch.arange(vocab, device=weights.device), 0).amax(1, keepdim=True)
    picked = torch.where(weights.gather(1, places) > 0, places, last).squeeze(1)
    out.copy_(torch.where(certain, best, picked))
