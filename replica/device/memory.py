"""The KV of blocks of a device, as bytes in the host's memory."""

import logging
import time
from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

from replica.device.accelerator import Accelerator
from replica.sizing import GIGABYTE

log = logging.getLogger(__name__)


class DeviceMemory:
    """`caches` is [layers, 2, blocks, block_size, kv_heads, head_dim], and each block in one piece.

    Copies do not wait for the step that is being computed: the engine moves no block that such a step may write. Nor
    does a save, for which the engine waits, wait for the loads of other requests.
    """

    is_host = False

    def __init__(self, caches: Tensor, accelerator: Accelerator) -> None:
        self._caches = caches
        self._accelerator = accelerator
        self._shape = caches[:, :, 0].shape
        self.block_bytes = caches[:, :, 0].nbytes
        self._reads = Beside(accelerator)
        self._writes = Beside(accelerator)

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        def copy() -> None:
            for block, target in zip(blocks, into, strict=True):
                self._on_host(target).copy_(self._caches[:, :, block], non_blocking=True)

        self._reads.run(copy)

    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        def copy() -> None:
            for block, payload in zip(blocks, payloads, strict=True):
                self._caches[:, :, block].copy_(self._on_host(payload), non_blocking=True)

        self._writes.run(copy)

    def pin(self, host: memoryview) -> None:
        began_s = time.monotonic()
        if self._accelerator.pin(host):
            log.info("pinned %.3g GB of host memory in %.1f s", len(host) / GIGABYTE, time.monotonic() - began_s)
        else:
            log.warning("%.3g GB of host memory cannot be pinned: blocks take longer to move", len(host) / GIGABYTE)

    def _on_host(self, block: memoryview) -> Tensor:
        # Torch takes no memory that cannot be written.
        own = torch.frombuffer(bytearray(block) if block.readonly else block, dtype=torch.uint8)
        return own.view(self._caches.dtype).view(self._shape)


class Beside:
    """Copies beside the device's other work, for one thread at a time."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._lock = Lock()
        self._run = accelerator.beside()

    def run(self, copy: Callable[[], None]) -> None:
        with self._lock, torch.inference_mode():
            self._run(copy)
