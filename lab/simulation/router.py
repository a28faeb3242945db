"""A router of the simulated fleet: the shipped placement and queue for room, without HTTP."""

from collections.abc import Iterator, Sequence

from events.messages import KnownEvent
from events.native import Load
from events.resolver import Resolver
from lab.simulation.job import MODEL, Job
from lab.simulation.settings import CONFIG, Settings
from replica.messages import KVSource
from router.placement.placement import APPROXIMATE, APPROXIMATE_TOKENS, Placed, Placement
from router.placement.ring import Ring
from router.placement.waiting import Waiting


class SimulatedRouter:
    def __init__(
        self,
        names: Sequence[str],
        policy: str,
        block_tokens: int,
        capacity_blocks: int,
        settings: Settings,
        *,
        seed: int,
    ) -> None:
        self.waiting: Waiting[Job] = Waiting(settings.queue_size)
        self._placement = Placement(
            policy,
            optimistic_ttl_s=CONFIG.optimistic_ttl_s,
            first_token_timeout_s=CONFIG.first_token_timeout_s,
            approximate_blocks=APPROXIMATE_TOKENS // block_tokens,
            optimistic=settings.optimistic,
            seed=seed,
        )
        size = {"block_size": block_tokens, "total_blocks": capacity_blocks}
        self._loads = [self._placement.add(name, limit=settings.replica_limit, **size) for name in names]
        self._candidates = [load.candidate for load in self._loads]
        if settings.pull_tokens_per_s:
            for number, load in enumerate(self._loads):
                self._placement.offers(load, str(number), MODEL)
        self._block_size = block_tokens if settings.events else APPROXIMATE
        self._slots = {self._block_size: sum(1 << candidate.slot for candidate in self._candidates)}
        self._resolvers = [Resolver(MODEL, native=True) for _ in names]
        self._ring = Ring(names)
        self._queue_timeout_s = settings.queue_timeout_s
        self._placed: dict[int, Placed] = {}  # by the job's number

    def place(self, job: Job, now_s: float) -> bool:
        """Choose the job's replica, and its rank there; return False if none has room."""
        self._placement.expire(now_s)
        session, came_s = job.request.session, job.request.at_s
        question, _ = self._placement.question(job.prompt, self._slots, now_s, session=session, came_s=came_s)
        decision = self._placement.decide(question, self._candidates, self._ring)
        if decision.chosen is None:
            return False
        job.replica = self._candidates.index(decision.chosen)
        pull = question.pulls.get(decision.chosen.slot)
        job.sources = [KVSource(one.endpoint, one.tokens) for one in pull.neighbours] if pull is not None else []
        load = self._loads[job.replica]
        placed = self._placement.sent(decision, load, job.prompt, self._block_size, now_s, ranked=True)
        self._placed[job.number] = placed
        job.rank = now_s + decision.priority_s(now_s)
        return True

    def wait(self, job: Job, now_s: float) -> Job | None:
        """Queue the job until there is room; return the job refused because the queue is full, if any."""
        since_s = job.request.at_s
        return self.waiting.offer(job, 0.0, now_s, since_s + self._queue_timeout_s, since_s=since_s)

    def with_room(self, now_s: float) -> Iterator[Job]:
        """Take out the waiting jobs that have room now; place each before the next."""
        return self.waiting.with_room(now_s, lambda _: self._candidates)

    def begun(self, job: Job, now_s: float) -> None:
        self._placement.begun(self._placed[job.number], now_s)

    def ended(self, job: Job, now_s: float) -> None:
        self._placement.ended(self._placed.pop(job.number), now_s)

    def reported(self, replica: int, load: Load, now_s: float) -> None:
        self._loads[replica].reported(load, now_s)

    def heard(self, replica: int, events: Sequence[KnownEvent]) -> None:
        for change in self._resolvers[replica].apply(events):
            self._placement.index.apply(self._candidates[replica].slot, change)
