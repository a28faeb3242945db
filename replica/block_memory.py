"""The KV of single blocks as bytes: the interface between the engine's memory and whatever moves blocks."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class BlockMemory(Protocol):
    """Callable from any thread. The caller makes sure that nobody writes a block that is read, or reads or writes one
    that is written."""

    block_bytes: int  # of one block's KV, in all layers
    is_host: bool  # steps are computed in the host's memory, and wait for it while it is copied

    def read(self, block: int, into: memoryview) -> None:
        """Copy the block's KV to contiguous memory."""
        ...

    def write(self, block: int, payload: memoryview) -> None:
        """Copy contiguous memory, as `read` gives it, to the block."""
        ...


class ArrayMemory:
    """KV in one array of bytes, [layers, 2, blocks, bytes of one layer's keys or values]."""

    is_host = True

    def __init__(self, array: NDArray[np.uint8]) -> None:
        layers, both, _, size = array.shape
        self.block_bytes = layers * both * size
        self._array = array
        self._shape = layers, both, size

    # numpy copies without the interpreter's lock: other threads go on.

    def read(self, block: int, into: memoryview) -> None:
        np.copyto(np.frombuffer(into, np.uint8).reshape(self._shape), self._array[:, :, block])

    def write(self, block: int, payload: memoryview) -> None:
        np.copyto(self._array[:, :, block], np.frombuffer(payload, np.uint8).reshape(self._shape))
