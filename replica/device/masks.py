"""Masks of constrained answers: bits on the host, sent in one copy, applied to the logits on the device."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replica.device.accelerator import Accelerator

PLACE_BYTES = 8


class Masks:
    """Two pieces of host memory take turns: while the device may still read one, the next step goes into the other."""

    def __init__(self, requests: int, vocab_size: int, accelerator: Accelerator) -> None:
        self._row_bytes = -(-vocab_size // 32) * 4
        size = requests * (PLACE_BYTES + self._row_bytes)
        self._hosts = [accelerator.host_bytes(size) for _ in range(2)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=accelerator.device)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=accelerator.device)

    @property
    def nbytes(self) -> int:
        return self._device.nbytes

    def apply(self, logits: Tensor, bits: Mapping[int, NDArray[np.uint8]]) -> None:
        """Rule out tokens in some rows: each has a bit for every token that may come next."""
        self._hosts.reverse()
        host = self._hosts[0].numpy()
        split = len(bits) * PLACE_BYTES
        end = split + len(bits) * self._row_bytes
        host[:split].view(np.int64)[:] = list(bits)
        np.stack(list(bits.values()), out=host[split:end].reshape(len(bits), self._row_bytes))
        self._device[:end].copy_(self._hosts[0][:end], non_blocking=True)
        rows = self._device[:split].view(torch.int64)
        packed = self._device[split:end].view(len(bits), self._row_bytes, 1)
        allowed = ((packed >> self._shifts) & 1).view(len(bits), -1)[:, : logits.shape[1]].bool()
        logits[rows] = torch.where(allowed, logits[rows], -torch.inf)
