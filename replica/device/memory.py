"""The KV of single blocks of a device, as bytes in the host's memory."""

from threading import Lock

import torch
from torch import Tensor

from replica.device.accelerator import Accelerator


class DeviceMemory:
    """`caches` is [layers, 2, blocks, block_size, kv_heads, head_dim].

    Copies do not wait for the step that is being computed: the engine moves no block that such a step may write. Nor
    does a save, for which the engine waits, wait for the loads of other requests.
    """

    is_host = False

    def __init__(self, caches: Tensor, accelerator: Accelerator) -> None:
        self._caches = caches
        self.block_bytes = caches[:, :, 0].nbytes
        self._reads = Staging(caches, accelerator)
        self._writes = Staging(caches, accelerator)

    def read(self, block: int, into: memoryview) -> None:
        own = self._reads
        with own.lock, torch.inference_mode():
            own.run_beside(lambda: own.block.copy_(self._caches[:, :, block], non_blocking=True))
            into[:] = own.bytes

    def write(self, block: int, payload: memoryview) -> None:
        own = self._writes
        with own.lock, torch.inference_mode():
            own.bytes[:] = payload
            own.run_beside(lambda: self._caches[:, :, block].copy_(own.block, non_blocking=True))


class Staging:
    """Room for one block in the host's memory, and a place beside the device's other work to copy it."""

    def __init__(self, caches: Tensor, accelerator: Accelerator) -> None:
        block = caches[:, :, 0]
        staging = accelerator.host_bytes(block.nbytes)
        self.lock = Lock()
        self.run_beside = accelerator.beside()
        self.bytes = staging.numpy().data
        self.block = staging.view(caches.dtype).view(block.shape)
