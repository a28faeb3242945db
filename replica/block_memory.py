"""The interface of KV memory by block: its bytes, whatever device holds them."""

from typing import Protocol


class BlockMemory(Protocol):
    """Reads and writes whole blocks; any thread may call it."""

    block_bytes: int  # of one block's KV, all layers

    def read(self, block: int, into: memoryview) -> None:
        """Copy the block's bytes, contiguous, into a buffer of `block_bytes`."""

    def write(self, block: int, payload: memoryview) -> None:
        """Replace the block's bytes."""
