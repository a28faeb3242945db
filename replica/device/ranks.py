"""The ranks of a model that have a device each, as one of them sees them: by torch.distributed.

NCCL's collectives can be part of graphs. Each one is called by all ranks, in the same order.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn import functional

from replica.device.accelerator import Accelerator
from replica.model.config import ModelConfig
from replica.model.ranks import Ranks
from replica.model.shares import Share, parts_of

NCCL = "nccl"
# Ranks reach a collective at nearly the same time: one that is so late will not come.
TIMEOUT = timedelta(seconds=300)


class RankLostError(ConnectionError):
    """Another rank has died or hangs."""


class DeviceGroup:
    """All ranks, as this process sees them; torch has one such group in a process at a time."""

    def __init__(self, share: Share, file: Path, accelerator: Accelerator, backend: str = NCCL) -> None:
        """Wait for all ranks. They meet by a file that is not there yet, and look at it later, too."""
        # All ranks are on this machine: nobody else should be able to reach what they listen on.
        for library in ("NCCL", "GLOO"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            backend,
            init_method=file.absolute().as_uri(),
            rank=share.rank,
            world_size=share.size,
            timeout=TIMEOUT,
            device_id=accelerator.device if backend == NCCL else None,
        )
        self._share = share
        self._backend = backend
        self.sum(torch.zeros(1, device=accelerator.device))  # takes the memory that all later ones need

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks. May reuse `partial`."""
        partial = partial.contiguous()
        with lost():
            distributed.all_reduce(partial)
        return partial

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape, on the first one, and none on the others."""
        parts = [part.new_empty(part.shape) for _ in range(self._share.size)]
        with lost():
            distributed.all_gather(parts, part.contiguous())
        return [] if self._share.rank else parts

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor. May write to those of the others."""
        tensor = tensor.contiguous()
        with lost():
            distributed.broadcast(tensor, 0)
        return tensor

    def close(self) -> None:
        """Leave the group, except NCCL's: it would wait for ranks that are gone. It ends with the process."""
        if self._backend != NCCL:
            distributed.destroy_process_group()


@contextmanager
def lost() -> Iterator[None]:
    """A collective fails only where another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(str(error)) from error


class GroupRanks(Ranks):
    """The other ranks, as one rank's part of the model sees them."""

    def __init__(self, share: Share, config: ModelConfig, group: DeviceGroup) -> None:
        self.share = share
        self.group = group
        self._parts = parts_of(config, share)
        parts = [Share(rank, share.size).part(config.vocab_size) for rank in range(share.size)]
        self._first_token = parts[share.rank].start
        self._widths = [part.stop - part.start for part in parts]

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

    def __init__(self, share: Share, config: ModelConfig, group: DeviceGroup, tell: Callable[[int], None]) -> None:
        """`tell` has the followers take part in the logits of so many rows."""
        super().__init__(share, config, group)
        self._tell = tell

    def spread(self, hidden: Tensor) -> Tensor:
        self._tell(len(hidden))
        return super().spread(hidden)
