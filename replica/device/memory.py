"""The KV of single blocks of a device, as bytes in the host's memory."""

from threading import Lock

import torch
from torch import Tensor

from replica.device.accelerator import Accelerator


class DeviceMemory:
    """`caches` is [layers, 2, blocks, block_size, kv_heads, head_dim].

    Copies do not wait for the step that is being computed: the engine moves no block that such a step may write.
    """

    def __init__(self, caches: Tensor, accelerator: Accelerator) -> None:
        self._caches = caches
        self._run_beside = accelerator.beside()
        self._lock = Lock()  # there is one staging area
        block = caches[:, :, 0]
        self.block_bytes = block.nbytes
        staging = accelerator.host_bytes(block.nbytes)
        self._bytes = staging.numpy().data
        self._staging = staging.view(caches.dtype).view(block.shape)

    def read(self, block: int, into: memoryview) -> None:
        with self._lock, torch.inference_mode():
            self._run_beside(lambda: self._staging.copy_(self._caches[:, :, block], non_blocking=True))
            into[:] = self._bytes

    def write(self, block: int, payload: memoryview) -> None:
        with self._lock, torch.inference_mode():
            self._bytes[:] = payload
            self._run_beside(lambda: self._caches[:, :, block].copy_(self._staging, non_blocking=True))
