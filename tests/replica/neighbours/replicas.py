"""Sources and readers for tests: the real pool, with KV memory of numpy whose content tells its block's tokens."""

import hashlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.cache.moves import GiveWay, Pull
from replica.neighbours.connection import NeighbourConfig
from replica.neighbours.holds import Holds
from replica.neighbours.reader import Reader
from replica.neighbours.source import Source
from tests.events.processes import wait_until
from tests.replica.engines import MODEL, SIZE, admit, chain

SECRET = b"a secret of the fleet, not a real one"
LAYOUT = "layout-1"
BLOCK_BYTES = 4096
ANY_PORT = "tcp://127.0.0.1:0"


class ArrayMemory:
    """A BlockMemory; `on_read` and `on_write` are called first, with the block."""

    is_host = True

    def __init__(self, num_blocks: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.rows = np.zeros((num_blocks, block_bytes), np.uint8)
        self.on_read: Callable[[int], object] = lambda _: None
        self.on_write: Callable[[int], object] = lambda _: None

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        for block, target in zip(blocks, into, strict=True):
            self.on_read(block)
            target[:] = self.rows[block].data

    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            self.on_write(block)
            self.rows[block] = np.frombuffer(payload, np.uint8)

    def pin(self, host: memoryview) -> None:
        pass


def payload_of(of: Chain, index: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Return bytes that a block of another prefix does not have."""
    prefix = repr((of.lora_name, of.cache_salt, of.tokens[: (index + 1) * of.block_size].tolist(), of.extras))
    seed = hashlib.sha256(prefix.encode()).digest()
    return (seed * (block_bytes // len(seed) + 1))[:block_bytes]


def tokens_of(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + blocks * SIZE))


def wanted(blocks: int, start: int = 0, *, first: int = 0, **extra: Any) -> Pull:
    """Return the blocks of `tokens_of`, which a source has if it has served them."""
    return Pull("", chain([*tokens_of(blocks, first), 1], **extra), start, range(start, blocks), 0.0)


def pull(
    reader: Reader,
    endpoint: str,
    want: Pull,
    targets: Sequence[int],
    until_s: float,
    give_way: GiveWay = lambda *_: None,
) -> int:
    patience_s = until_s - time.monotonic()
    return reader.pull(want._replace(endpoint=endpoint, blocks=targets, patience_s=patience_s), give_way)


class Engine:
    """A pool and its thread, as an engine's loop would be."""

    def __init__(self, num_blocks: int, block_bytes: int = BLOCK_BYTES, **holds: Any) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.memory = ArrayMemory(num_blocks, block_bytes)
        self.holds = Holds(self.pool, **holds)

    def serve(self, prompt: Chain) -> list[int]:
        """Compute a prompt, and let its blocks go."""
        blocks = admit(self.pool, prompt)
        for index in range(prompt.named, len(prompt.keys)):
            self.memory.rows[blocks[index]] = np.frombuffer(
                payload_of(prompt, index, self.memory.block_bytes), np.uint8
            )
        self.pool.store(prompt, blocks, len(prompt.keys))
        self.pool.release(blocks)
        return blocks

    def turn(self, wait_s: float = 0.01) -> None:
        """Wait for what other threads ask for, and do it."""
        select.select([self.holds.descriptor], [], [], wait_s)
        self.holds.serve()


class ServingEngine(Engine):
    """An engine that answers holds on a thread of its own, and a source beside it."""

    def __init__(self, num_blocks: int, block_bytes: int = BLOCK_BYTES, share: float = 1 / 8, **config: Any) -> None:
        super().__init__(num_blocks, block_bytes, share=share)
        self.source = Source(neighbour_config(**config), ANY_PORT, self.holds, self.memory)
        self._ends = threading.Event()
        self._steps = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            with self._steps:
                self.turn()

    def paused(self) -> threading.Lock:
        """Return what to hold while the engine is to answer nothing."""
        return self._steps

    def close(self) -> None:
        self.source.close()
        wait_until(lambda: not self.source.readers, "every stream has ended")
        self._ends.set()
        self._thread.join()
        self.holds.close()
        assert not self.holds.references, "blocks are still held"
        self.pool.check()


def neighbour_config(**changes: Any) -> NeighbourConfig:
    fields: dict[str, Any] = {
        "secret": SECRET,
        "model": MODEL,
        "kv_layout": LAYOUT,
        "block_size": SIZE,
        "most_tokens": 100_000,
    }
    return NeighbourConfig(**(fields | changes))


@contextmanager
def reading(memory: ArrayMemory, **changes: Any) -> Iterator[Reader]:
    own = Reader(neighbour_config(**changes), memory)
    try:
        yield own
    finally:
        own.close()


def came(memory: ArrayMemory, want: Pull, targets: Sequence[int], count: int) -> bool:
    """Return True if the first `count` targets hold what was wanted."""
    expected = (payload_of(want.chain, index, memory.block_bytes) for index in range(want.start, want.start + count))
    return all(memory.rows[target].tobytes() == own for target, own in zip(targets, expected, strict=False))
