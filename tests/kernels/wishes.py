"""Logits, and what clients wish to be drawn from them: all that a sampler has to get right, in one batch."""

from typing import NamedTuple

import torch
from torch import Tensor


class Wishes(NamedTuple):
    """Sampling parameters of each row, in the order of a draw's arguments."""

    logits: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    wheres: Tensor


def wishes(rows: int, vocab: int, seed: int) -> Wishes:
    """Flat and steep rows, some with many equal logits; and every mixture of wishes."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(count: int = rows) -> Tensor:
        return torch.rand(count, generator=generator)

    logits = torch.randn(rows, vocab, generator=generator) * (6 * uniform()).unsqueeze(1)
    logits[:, ::3] = logits[:, ::3].round()
    number = torch.arange(rows)
    return Wishes(
        logits=logits,
        temperatures=torch.where(number % 7 == 6, 0, 1.5 * uniform() + 0.01),
        top_ks=torch.where(number % 2 == 0, 0, torch.randint(-1, 60, (rows,), generator=generator)).int(),
        top_ps=torch.where(number % 3 == 0, 1, uniform() + 0.05),
        min_ps=torch.where(number % 5 == 0, 0.2 * uniform(), 0),
        wheres=torch.rand(rows, generator=generator, dtype=torch.float64),
    )


def broken(vocab: int) -> Tensor:
    """Logits with no drawable token in some or all rows."""
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    logits[0, 3] = torch.nan
    logits[1, [5, 7]] = torch.inf
    logits[2] = -torch.inf
    logits[3, : vocab // 2] = -torch.inf
    logits[4] = torch.nan
    logits[5, 1:], logits[5, 0] = torch.nan, -1.0
    return logits
