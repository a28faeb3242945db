"""Collectives of ranks with a device each, by torch.distributed; NCCL's can be part of graphs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed

from replica.device.accelerator import Accelerator
from replica.parallel.group import RankLostError
from replica.parallel.shares import Share

NCCL = "nccl"
# Ranks reach a collective at nearly the same time: one that is so late will not come.
TIMEOUT = timedelta(seconds=300)


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
        partial = partial.contiguous()
        with lost():
            distributed.all_reduce(partial)
        return partial

    def gather(self, part: Tensor) -> list[Tensor]:
        parts = [part.new_empty(part.shape) for _ in range(self._share.size)]
        with lost():
            distributed.all_gather(parts, part.contiguous())
        return [] if self._share.rank else parts

    def broadcast(self, tensor: Tensor) -> Tensor:
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
