"""Blocks held for readers: found and given back on the engine's thread, asked for by others.

A held block has one more reference, so it keeps its content; the same is true of a slot of the host's memory. Holds are
bounded: together they are at most a share of the pool's size, and each leaves half of the free blocks free, so that a
request waits for room no longer than the longest hold. A hold lasts as long as its stream, which
`replica.neighbours.source` bounds.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import NamedTuple, TypeVar

from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain

SHARE = 1 / 8  # all readers' share of the pool
NO_ROOM = "busy"

Found = TypeVar("Found")


class Held(NamedTuple):
    """Blocks of a chain from its `start` on; `reason` says why there are none, if the cache has them."""

    blocks: Sequence[int]
    reason: str = ""


class Holds:
    """The engine's thread polls `descriptor` and calls `serve` between its steps."""

    def __init__(self, pool: BlockPool, share: float = SHARE) -> None:
        self._pool = pool
        self._most = int(pool.num_blocks * share)
        self._lock = threading.Lock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._is_closed = False
        self.references: dict[int, int] = {}  # readers' references by block
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def held(self) -> int:
        """References that readers have, a block of two readers counted twice."""
        return sum(self.references.values())

    # ---- any thread

    def hold(self, chain: Chain, start: int, stop: int, wait_s: float) -> Held:
        """Hold the chain's blocks from `start` to `stop`, as many as there are. Pass the result to `give_back`."""
        return self._ask(lambda: self._hold(chain, start, stop), wait_s, Held((), NO_ROOM))

    def hottest(self, most_blocks: int, model: str, wait_s: float) -> list[Chain]:
        """Find the prefixes with which most prompts begin, without a hold on them."""
        return self._ask(lambda: self._pool.hottest(most_blocks, model), wait_s, [])

    def _ask(self, look: Callable[[], Found], wait_s: float, otherwise: Found) -> Found:
        answer: Future[Found] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(look())

        self._add(run, otherwise=answer.cancel)
        try:
            return answer.result(wait_s)
        except CancelledError:
            return otherwise
        except TimeoutError:  # the engine is in a long step
            # Blocks that it has begun to look for come at once, and have to be given back.
            return otherwise if answer.cancel() else answer.result()

    def give_back(self, held: Held) -> None:
        if held.blocks:
            self._add(lambda: self._release(held.blocks))

    def _add(self, task: Callable[[], None], otherwise: Callable[[], object] = lambda: None) -> None:
        with self._lock:
            if not self._is_closed:
                self._tasks.append(task)
                os.eventfd_write(self.descriptor, 1)
                return
        otherwise()

    # ---- the engine's thread

    def serve(self) -> None:
        """Do what other threads have asked for."""
        if not self._tasks:
            return
        with self._lock:
            tasks = list(self._tasks)
            self._tasks.clear()
            os.eventfd_read(self.descriptor)
        for task in tasks:
            task()

    def close(self) -> None:
        """Refuse further holds. Call it when the engine's loop has ended."""
        with self._lock:
            self._is_closed = True
        self.serve()
        os.close(self.descriptor)

    def _hold(self, chain: Chain, start: int, stop: int) -> Held:
        pool, lower = self._pool, self._pool.lower
        match = pool.match(chain)
        found = [*match.blocks, *match.lower][start:stop]
        slots: list[int] = []
        spare = pool.free // 2
        # Up to the first that may not be held: a reader needs a prefix.
        for slot in found[: max(0, self._most - self.held)]:
            if slot < pool.num_blocks:
                spare -= not pool.references(slot)
                if spare < 0:
                    break
            elif lower is None or slot not in lower.host or (slot not in self.references and lower.host.is_held(slot)):
                break  # it is on the disk, or its content may still be on the way
            slots.append(slot)
        if not slots:
            return Held((), NO_ROOM if found else "")
        blocks, below = self._split(slots)
        pool.touch(blocks)
        if lower is not None:
            lower.hold(below)
        for slot in slots:
            self.references[slot] = self.references.get(slot, 0) + 1
        return Held(slots)

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.references[slot] -= 1
            if not self.references[slot]:
                del self.references[slot]
        blocks, below = self._split(slots)
        self._pool.release(blocks)
        if self._pool.lower is not None:
            self._pool.lower.release_read(below)

    def _split(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the pool's own, and those of lower media."""
        first = self._pool.num_blocks
        return [slot for slot in slots if slot < first], [slot for slot in slots if slot >= first]
