"""The KV of single blocks as bytes: the interface between the engine's memory and whatever moves blocks."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class BlockMemory(Protocol):
    """Callable from any thread. The caller makes sure that nobody writes a block that is read, or reads or writes one
    that is written. A device moves several blocks together sooner than one by one."""

    block_bytes: int  # the size of one block's KV, in all layers
    is_host: bool  # steps are computed in the host's memory, and wait for it while it is copied

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy each block's KV to contiguous memory."""

    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy contiguous memory, as `read` gives it, to the blocks."""

    def pin(self, host: memoryview) -> None:
        """Prepare the host's memory to and from which most will be copied, if that makes copies faster."""


class ArrayMemory:
    """KV in one array of bytes, [layers, 2, blocks, bytes of one layer's keys or values]."""

    is_host = True

    def __init__(self, array: NDArray[np.uint8]) -> None:
        layers, both, _, size = array.shape
        self.block_bytes = layers * both * size
        self._array = array
        self._shape = layers, both, size

    # numpy copies without the interpreter's lock: other threads go on.

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        for block, target in zip(blocks, into, strict=True):
            np.copyto(np.frombuffer(target, np.uint8).reshape(self._shape), self._array[:, :, block])

    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            np.copyto(self._array[:, :, block], np.frombuffer(payload, np.uint8).reshape(self._shape))

    def pin(self, host: memoryview) -> None:
        pass
