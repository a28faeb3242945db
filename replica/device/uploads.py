"""Weights on their way from mapped files to the device."""

import torch
from torch import Tensor

from replica.device.accelerator import Accelerator, Wait

PIECE_BYTES = 64 << 20


class Uploads:
    """Tensors go through two pieces of pinned memory in turns: while the device reads one, the other is filled."""

    def __init__(self, accelerator: Accelerator, piece_bytes: int = PIECE_BYTES) -> None:
        self._accelerator = accelerator
        self._hosts = [accelerator.host_bytes(piece_bytes) for _ in range(2)]
        self._waits: list[Wait] = [lambda: None, lambda: None]
        self._piece_bytes = piece_bytes

    def send(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device; work that is given to the device from now on finds it there."""
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._accelerator.device)
        source, target = (whole.view(-1).view(torch.uint8) for whole in (tensor.contiguous(), sent))
        for begin in range(0, len(source), self._piece_bytes):
            piece = source[begin : begin + self._piece_bytes]
            self._hosts.reverse()
            self._waits.reverse()
            self._waits[0]()
            host = self._hosts[0][: len(piece)]
            host.copy_(piece)
            target[begin : begin + len(piece)].copy_(host, non_blocking=True)
            self._waits[0] = self._accelerator.mark()
        return sent
