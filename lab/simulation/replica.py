"""A replica with one prefill at a time (as a bound, `servers` at once), on the engine's own block pool.

A request's prefill takes its uncached tokens divided by the replica's rate, and then its blocks are cached; decoding
takes output tokens divided by the decode rate, and only holds blocks. Generated tokens are not cached.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Protocol

from events.messages import KnownEvent
from events.native import Load
from lab.simulation.agenda import Agenda
from lab.simulation.job import MODEL, Job
from lab.simulation.settings import Settings
from replica.block_pool import BlockPool
from replica.chain import Chain


class HeadFirst(BlockPool):
    """Evict the first blocks of the least recently used request first: their loss hurts most."""

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks[::-1])


POOLS: dict[str, Callable[[int], BlockPool]] = {
    "lru": lambda blocks: BlockPool(blocks, 1),
    "head-first": lambda blocks: HeadFirst(blocks, 1),
}


class Observer(Protocol):
    def published(self, replica: int, events: Sequence[KnownEvent]) -> None: ...
    def begun(self, job: Job) -> None: ...
    def ended(self, job: Job) -> None: ...


class SimulatedReplica(Protocol):
    pool: BlockPool

    def submit(self, job: Job) -> None: ...
    def load(self) -> Load: ...


class FifoReplica:
    def __init__(self, number: int, settings: Settings, block_tokens: int, agenda: Agenda, observer: Observer) -> None:
        self.pool = POOLS[settings.eviction](settings.capacity_blocks(block_tokens))
        self._number = number
        self._settings = settings
        self._block_tokens = block_tokens
        self._agenda = agenda
        self._observer = observer
        self._waiting: list[tuple[float, int, Job, Chain]] = []  # a heap
        self._running = 0
        self._queued_tokens = 0  # of waiting requests
        self._ready_s = 0.0  # end of the newest prefill
        self._prefilling = 0

    def submit(self, job: Job) -> None:
        chain = Chain(job.prompt.ids, 1, MODEL)
        job.uncached_tokens = self._uncached(job, len(self.pool.match(chain).blocks))
        self._queued_tokens += job.uncached_tokens
        heappush(self._waiting, (job.rank, job.number, job, chain))
        self._go_on()

    def load(self) -> Load:
        left_s = max(0.0, self._ready_s - self._agenda.now_s)
        return Load(
            running=self._running,
            waiting=len(self._waiting),
            queued_prefill_tokens=self._queued_tokens + round(left_s * self._settings.prefill_tokens_per_s),
            free_blocks=self.pool.free,
            cached_blocks=self.pool.named,
            prefill_tokens_per_s=self._settings.prefill_tokens_per_s,
        )

    def _uncached(self, job: Job, blocks: int) -> int:
        return job.request.input_tokens - blocks * self._block_tokens

    def _go_on(self) -> None:
        if self._prefilling == self._settings.servers or not self._waiting:
            return
        _, _, job, chain = self._waiting[0]
        match = self.pool.match(chain)
        matched = len(match.blocks)
        blocks = self.pool.take(match.blocks, len(chain) - matched)
        if blocks is None:
            return  # until a running request ends
        heappop(self._waiting)
        self._queued_tokens -= job.uncached_tokens
        job.uncached_tokens = self._uncached(job, matched)
        chain.named, chain.identity = matched, match.identity
        self._prefilling += 1
        self._running += 1
        self._publish()
        self._ready_s = self._agenda.now_s + job.uncached_tokens / self._settings.prefill_tokens_per_s
        self._agenda.at(self._ready_s, partial(self._prefilled, job, chain, blocks))
        self._go_on()

    def _prefilled(self, job: Job, chain: Chain, blocks: list[int]) -> None:
        self.pool.store(chain, blocks, job.prompt.full)
        self._publish()
        self._prefilling -= 1
        job.first_s = self._agenda.now_s
        self._observer.begun(job)
        decode_s = job.request.output_tokens / self._settings.decode_tokens_per_s
        self._agenda.after(decode_s, partial(self._decoded, job, blocks))
        self._go_on()

    def _decoded(self, job: Job, blocks: list[int]) -> None:
        self.pool.release(blocks)
        self._running -= 1
        self._observer.ended(job)
        self._go_on()

    def _publish(self) -> None:
        events = self.pool.take_events()
        if events:
            self._observer.published(self._number, events)
