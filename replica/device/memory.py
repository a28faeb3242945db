"""The KV of blocks of a device, as bytes in the host's memory."""

import logging
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from replica.device.accelerator import Accelerator
from replica.model.sizing import GIGABYTE

AT_ONCE = 3  # two parts of what a mover moves, and a save that the engine waits for

log = logging.getLogger(__name__)


class DeviceMemory:
    """`caches` is [layers, 2, blocks, block_size, kv_heads, head_dim], and each block in one piece.

    Copies do not wait for the step that is being computed: the engine moves no block that such a step may write. Nor
    does a save, for which the engine waits, wait for the loads of other requests.
    """

    is_host = False

    def __init__(self, caches: Tensor, accelerator: Accelerator) -> None:
        blocks = caches.movedim(2, 0)
        self._blocks = blocks.view(torch.uint8).view(len(blocks), -1)
        self._accelerator = accelerator
        self.block_bytes = self._blocks.shape[1]
        self._reads = Beside(accelerator)
        self._writes = Beside(accelerator)

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        self._reads.copy([_bytes_of(target) for target in into], [self._blocks[block] for block in blocks])

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        self._writes.copy([self._blocks[block] for block in blocks], [_bytes_of(payload) for payload in payloads])

    def pin(self, host: memoryview) -> None:
        began_s = time.monotonic()
        if self._accelerator.pin(host):
            log.info("pinned %.3g GB of host memory in %.1f s", len(host) / GIGABYTE, time.monotonic() - began_s)
        else:
            log.warning("%.3g GB of host memory cannot be pinned: blocks take longer to move", len(host) / GIGABYTE)


def _bytes_of(block: memoryview) -> Tensor:
    # Torch takes no memory that cannot be written.
    return torch.frombuffer(bytearray(block) if block.readonly else block, dtype=torch.uint8)


class Beside:
    """Copies in one direction beside the device's other work, for a few threads at a time.

    While one thread's copies are under way, the next one's are already given to the device: it never waits for Python.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._idle: SimpleQueue[Callable[[Callable[[], object]], None]] = SimpleQueue()
        for _ in range(AT_ONCE):
            self._idle.put(accelerator.beside())

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        run = self._idle.get()
        try:
            # One call for all, since threads of Python that take turns would take longer than the copies.
            run(lambda: torch._foreach_copy_(targets, sources, non_blocking=True))
        finally:
            self._idle.put(run)
