"""A replica with one prefill at a time (as a bound, `servers` at once), on the engine's own block pool.

A request's prefill takes its uncached tokens divided by the replica's rate, and then its blocks are cached; decoding
takes output tokens divided by the decode rate, and only holds blocks. Generated tokens are not cached.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

from events.messages import KnownEvent
from events.native import Load
from lab.simulation.job import MODEL, Job
from lab.simulation.settings import Settings
from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain


class Agenda:
    """A queue of events by time; those of the same time happen in order of entry."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, happens: Callable[[], None]) -> None:
        heappush(self._events, (max(time_s, self.now_s), next(self._numbers), happens))

    def after(self, delay_s: float, happens: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, happens)

    def step(self) -> bool:
        """Let the next event happen; return False if there is none."""
        if not self._events:
            return False
        self.now_s, _, happens = heappop(self._events)
        happens()
        return True


class Observer(Protocol):
    def published(self, replica: int, events: Sequence[KnownEvent]) -> None: ...
    def begun(self, job: Job) -> None: ...
    def ended(self, job: Job) -> None: ...


class Waiting(NamedTuple):
    """A request in the queue, in the order in which it is computed; its tokens as found when it came."""

    rank: float
    number: int
    job: Job
    chain: Chain
    uncached_tokens: int


class SimulatedReplica:
    def __init__(self, number: int, settings: Settings, block_tokens: int, agenda: Agenda, observer: Observer) -> None:
        self._pool = BlockPool(settings.capacity_blocks(block_tokens), 1)
        self._number = number
        self._settings = settings
        self._block_tokens = block_tokens
        self._agenda = agenda
        self._observer = observer
        self._waiting: list[Waiting] = []  # a heap
        self._running = 0
        self._ready_s = 0.0  # end of the newest prefill
        self._prefilling = 0

    def submit(self, job: Job) -> None:
        chain = Chain(job.prompt.ids, 1, MODEL)
        uncached_tokens = self._uncached(job, len(self._pool.match(chain).blocks))
        heappush(self._waiting, Waiting(job.rank, job.number, job, chain, uncached_tokens))
        self._go_on()

    def load(self) -> Load:
        left_s = max(0.0, self._ready_s - self._agenda.now_s)
        queued = sum(one.uncached_tokens for one in self._waiting)
        return Load(
            running=self._running,
            waiting=len(self._waiting),
            queued_prefill_tokens=queued + round(left_s * self._settings.prefill_tokens_per_s),
            free_blocks=self._pool.free,
            cached_blocks=self._pool.named,
            prefill_tokens_per_s=self._settings.prefill_tokens_per_s,
        )

    def _uncached(self, job: Job, blocks: int) -> int:
        return job.request.input_tokens - blocks * self._block_tokens

    # ---- one prefill

    def _go_on(self) -> None:
        if self._prefilling == self._settings.servers or not self._waiting:
            return
        job, chain = self._waiting[0].job, self._waiting[0].chain
        match = self._pool.match(chain)
        matched = len(match.blocks)
        blocks = self._pool.take(match.blocks, len(chain) - matched)
        if blocks is None:
            return  # it waits until a running request ends
        heappop(self._waiting)
        chain.named, chain.identity = matched, match.identity
        job.uncached_tokens = self._uncached(job, matched)
        self._prefilling += 1
        self._running += 1
        self._publish()
        self._ready_s = self._agenda.now_s + job.uncached_tokens / self._settings.prefill_tokens_per_s
        self._agenda.at(self._ready_s, partial(self._prefilled, job, chain, blocks, matched))
        self._go_on()

    def _prefilled(self, job: Job, chain: Chain, blocks: list[int], matched: int) -> None:
        self._pool.store(chain, blocks, job.prompt.full)
        self._publish()
        self._prefilling -= 1
        job.first_s = self._agenda.now_s
        self._observer.begun(job)
        decode_s = job.request.output_tokens / self._settings.decode_tokens_per_s
        self._agenda.after(decode_s, partial(self._decoded, job, blocks, matched))
        self._go_on()

    def _decoded(self, job: Job, blocks: list[int], matched: int) -> None:
        self._pool.release(blocks, matched if self._settings.forgetful and job.is_cold else None)
        self._running -= 1
        self._observer.ended(job)
        self._go_on()

    def _publish(self) -> None:
        events = self._pool.take_events()
        if events:
            self._observer.published(self._number, events)
