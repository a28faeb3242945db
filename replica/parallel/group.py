"""Collectives of one replica's ranks over gloo, on the loopback interface alone.

In float32 a row's result has to be the same to the last bit whatever batch it stands in (decision 0009). gloo's own
all-reduce adds in an order that depends on the tensor's size, so partial results are gathered, and added rank by rank.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.nn import functional

from replica.model.config import ModelConfig
from replica.parallel.shares import Share

LOOPBACK = "127.0.0.1"
# Ranks reach a collective at nearly the same time; one that comes so late hangs.
TIMEOUT = timedelta(minutes=5)
RENDEZVOUS = "ranks"


class RankLostError(ConnectionError):
    """Another rank has died or hangs."""


class Group:
    """The connections among all ranks; each collective is called by all of them, in the same order."""

    def __init__(self, folder: Path, share: Share) -> None:
        """Wait until all ranks are connected. The folder is needed only until they are."""
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        store = FileStore(str(folder / RENDEZVOUS), share.size)
        try:
            self._gloo = gloo(store, share.rank, share.size, options)
        except RuntimeError as error:
            raise RankLostError(str(error)) from error
        self._share = share

    def all_gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        gathered = [part.new_empty(part.shape) for _ in range(self._share.size)]
        self._wait(lambda: self._gloo.allgather(gathered, part.contiguous()))
        return gathered

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks on the first one, and none on the others."""
        gathered = [part.new_empty(part.shape) for _ in range(self._share.size)] if self._share.rank == 0 else []
        self._wait(lambda: self._gloo.gather(gathered, part.contiguous(), 0))
        return gathered

    def broadcast(self, rows: Tensor) -> None:
        """Copy the first rank's rows to those of the others."""
        self._wait(lambda: self._gloo.broadcast(rows, 0))

    def _wait(self, begin: Any) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise RankLostError(str(error)) from error


class GroupRanks:
    """The other ranks, as one rank's part of the model sees them (`replica.model.ranks`)."""

    def __init__(self, share: Share, config: ModelConfig) -> None:
        self.share = share
        self.config = config  # of the whole model
        parts = [Share(rank, share.size).part(config.vocab_size) for rank in range(share.size)]
        self._first_token = parts[share.rank].start
        self._widths = [part.stop - part.start for part in parts]

    def join_group(self, folder: Path) -> None:
        """Connect to the other ranks, before anything is computed."""
        self.group = Group(folder, self.share)

    def own(self, config: ModelConfig) -> ModelConfig:
        return self.share.own(config)

    def look_up(self, embedding: Tensor, token_ids: Tensor) -> Tensor:
        rows = token_ids - self._first_token
        elsewhere = (rows < 0) | (rows >= len(embedding))
        found = embedding[rows.masked_fill_(elsewhere, 0)]
        return self.add(found.masked_fill_(elsewhere[:, None], 0))

    def add(self, partial: Tensor) -> Tensor:
        total, *others = self.group.all_gather(partial)
        for other in others:
            total += other
        return total

    def spread(self, hidden: Tensor) -> Tensor:
        self.group.broadcast(hidden)
        return hidden

    def join(self, logits: Tensor) -> Tensor:
        widest = max(self._widths)  # parts may differ by a column
        parts = self.group.gather(functional.pad(logits, (0, widest - logits.shape[1])))
        if not parts:
            return logits
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)
