"""A replica with one prefill at a time (as a bound, `servers` at once), on the engine's own block pool.

A request's prefill takes its uncached tokens divided by the replica's rate, and then its blocks are cached; decoding
takes output tokens divided by the decode rate, and only holds blocks. Generated tokens are not cached. Blocks that are
brought from elsewhere take their tokens divided by the rate of their source, before the rest is computed.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import takewhile
from typing import NamedTuple, Protocol

from events.messages import KnownEvent
from events.native import Load
from lab.replay import Agenda
from lab.simulation.job import MODEL, Job
from lab.simulation.settings import Settings
from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.cache.moves import PULLED, Written
from replica.cache.names import Match


class Observer(Protocol):
    def published(self, replica: int, events: Sequence[KnownEvent]) -> None: ...
    def begun(self, job: Job) -> None: ...
    def ended(self, job: Job) -> None: ...
    def read(self, endpoint: str, chain: Chain) -> int:
        """Read a chain's leading blocks from another replica; return how many it has."""
        ...


class SimulatedReplica(Protocol):
    pool: BlockPool

    def submit(self, job: Job) -> None: ...
    def load(self) -> Load: ...


def readable_blocks(pool: BlockPool, chain: Chain) -> int:
    """Count the leading blocks of a chain that neighbours can read, in cache and host memory; they count as used."""
    match, lower = pool.match(chain), pool.lower
    pool.touch(match.blocks)
    pool.release(match.blocks)
    if lower is None:
        return len(match.blocks)
    slots = list(takewhile(lower.host.__contains__, match.lower))
    lower.hold(slots)
    lower.release_read(slots)
    return len(match.blocks) + len(slots)


class Waiting(NamedTuple):
    """A request in the queue, in the order in which it is computed; its tokens as found when it came."""

    rank: float
    number: int
    job: Job
    chain: Chain
    uncached_tokens: int
    brought_tokens: int


class FifoReplica:
    def __init__(self, number: int, settings: Settings, block_tokens: int, agenda: Agenda, observer: Observer) -> None:
        self.pool = BlockPool(
            settings.capacity_blocks(block_tokens),
            1,
            host_slots=settings.host_tokens // block_tokens,
            disk_slots=settings.disk_tokens // block_tokens,
        )
        self._number = number
        self._settings = settings
        self._rates = settings.rates()
        self._block_tokens = block_tokens
        self._agenda = agenda
        self._observer = observer
        self._waiting: list[Waiting] = []  # a heap
        self._running = 0
        self._ready_s = 0.0  # end of the newest prefill
        self._prefilling = 0

    def submit(self, job: Job) -> None:
        chain = Chain(job.prompt.ids, 1, MODEL)
        match = self.pool.match(chain)
        expected = max((one.tokens // self._block_tokens for one in job.sources), default=0)
        found, brought = len(match.blocks), len(self._sources(match, expected))
        uncached_tokens = self._uncached(job, found + brought)
        heappush(
            self._waiting, Waiting(job.rank, job.number, job, chain, uncached_tokens, brought * self._block_tokens)
        )
        self._go_on()

    def load(self) -> Load:
        left_s = max(0.0, self._ready_s - self._agenda.now_s)
        queued = sum(one.uncached_tokens for one in self._waiting)
        return Load(
            running=self._running,
            waiting=len(self._waiting),
            queued_prefill_tokens=queued + round(left_s * self._settings.prefill_tokens_per_s),
            loading_tokens=sum(one.brought_tokens for one in self._waiting),
            load_tokens_per_s=self._rates,
            host_blocks=self._settings.host_tokens // self._block_tokens,
            free_blocks=self.pool.free,
            cached_blocks=self.pool.named,
            prefill_tokens_per_s=self._settings.prefill_tokens_per_s,
        )

    def _uncached(self, job: Job, blocks: int) -> int:
        return job.request.input_tokens - blocks * self._block_tokens

    # ---- one prefill

    def _go_on(self) -> None:
        if self._prefilling == self._settings.servers or not self._waiting:
            return
        job, chain = self._waiting[0].job, self._waiting[0].chain
        match, lower = self.pool.match(chain), self.pool.lower
        if lower is not None:
            lower.hold(match.lower)
        matched = len(match.blocks)
        blocks = self.pool.take(match.blocks, len(chain) - matched)
        if blocks is None:
            if lower is not None:
                lower.release(match.lower, loaded=False)
            return  # it waits until a running request ends
        heappop(self._waiting)
        self._settle()
        chain.named, chain.identity = matched, match.identity
        here = matched + len(match.lower)
        readable = next((more for one in job.sources if (more := self._observer.read(one.endpoint, chain)) > here), 0)
        sources = self._sources(match, readable)
        job.uncached_tokens = self._uncached(job, matched + len(sources))
        job.brought_tokens = {one: count * self._block_tokens for one, count in Counter(sources).items()}
        self._prefilling += 1
        self._running += 1
        self._publish()
        brought_s = sum(tokens / self._rates[one] for one, tokens in job.brought_tokens.items())
        self._ready_s = self._agenda.now_s + brought_s + job.uncached_tokens / self._settings.prefill_tokens_per_s
        self._agenda.at(self._ready_s, partial(self._prefilled, job, chain, blocks, match.lower))
        self._go_on()

    def _sources(self, match: Match, readable: int) -> list[str]:
        """Name the source of each block after the hits, up to one that is sooner computed.

        `readable`: the blocks of the prompt that a neighbour has; those that are here, too, are not read there.
        """
        lower = self.pool.lower
        own = [lower.medium(slot) for slot in match.lower] if lower is not None else []
        sources = [*own, *[PULLED] * (readable - len(match.blocks) - len(own))]
        return list(takewhile(lambda one: self._rates[one] > self._settings.prefill_tokens_per_s, sources))

    def _prefilled(self, job: Job, chain: Chain, blocks: list[int], slots: Sequence[int]) -> None:
        self.pool.store(chain, blocks, job.prompt.full)
        if self.pool.lower is not None:
            self.pool.lower.release(slots, loaded=True)
            self._settle()
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

    def _settle(self) -> None:
        """Carry out the pool's moves, which take no time."""
        lower = self.pool.lower
        if lower is None:
            return
        writes = lower.saved(lower.take_saves())
        if writes:
            lower.written([Written(write, True) for write in writes])
            lower.take_erasures()

    def _publish(self) -> None:
        events = self.pool.take_events()
        if events:
            self._observer.published(self._number, events)
