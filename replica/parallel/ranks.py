"""The other ranks, as each rank's part of the model sees them, whatever they meet through."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from replica.model.config import ModelConfig
from replica.model.ranks import Ranks
from replica.parallel.shares import Share, parts_of


class Collectives(Protocol):
    """Each one is called by all ranks, in the same order."""

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks. May reuse `partial`."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape, on the first one, and none on the others."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor. May write to those of the others."""


class GroupRanks(Ranks):
    """The other ranks, as one rank's part of the model sees them."""

    def __init__(self, share: Share, config: ModelConfig, group: Collectives) -> None:
        self.share = share
        self.group = group
        self._parts = parts_of(config, share)
        parts = [Share(rank, share.size).part(config.vocab_size) for rank in range(share.size)]
        self._first_token = parts[share.rank].start
        self._widths = [part.stop - part.start for part in parts]

    def own(self, config: ModelConfig) -> ModelConfig:
        return self.share.own(config)

    def cut(self, projection: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        if projection in self._parts.columns:
            return down[:, self._parts.columns[projection].own], up
        return down, up[self._parts.rows[projection].own]

    def look_up(self, embedding: Tensor, token_ids: Tensor) -> Tensor:
        rows = token_ids - self._first_token
        elsewhere = (rows < 0) | (rows >= len(embedding))
        found = embedding[rows.masked_fill_(elsewhere, 0)]
        return self.add(found.masked_fill_(elsewhere[:, None], 0))

    def add(self, partial: Tensor) -> Tensor:
        return self.group.sum(partial)

    def of_first(self, tensor: Tensor) -> Tensor:
        return self.group.broadcast(tensor)

    def spread(self, hidden: Tensor) -> Tensor:
        return self.of_first(hidden)

    def join(self, logits: Tensor) -> Tensor:
        widest = max(self._widths)  # parts may differ by a column
        parts = self.group.gather(functional.pad(logits, (0, widest - logits.shape[1])))
        if not parts:
            return logits
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)


class LeadingRanks(GroupRanks):
    """Those of the first rank, which alone knows when there are logits to compute."""

    def __init__(self, share: Share, config: ModelConfig, group: Collectives, tell: Callable[[int], None]) -> None:
        """`tell` has the followers take part in the logits of so many rows."""
        super().__init__(share, config, group)
        self._tell = tell

    def spread(self, hidden: Tensor) -> Tensor:
        self._tell(len(hidden))
        return super().spread(hidden)
