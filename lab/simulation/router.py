"""A router of the simulated fleet: the shipped placement and queue for room, without HTTP."""

from collections.abc import Iterator, Sequence

from events.cache.resolver import Resolver
from events.messages import KnownEvent
from lab.simulation.job import MODEL, Job
from lab.simulation.settings import CONFIG, Settings
from router.placement.cost import Candidate, Question, Tenant
from router.placement.decision import Decision
from router.placement.index import APPROXIMATE, APPROXIMATE_TOKENS
from router.placement.load import Placed
from router.placement.placement import Placement
from router.placement.policy import Ring
from router.placement.waiting import STEP_S, Waiting


class SimulatedRouter:
    def __init__(self, policy: str, settings: Settings, block_tokens: int, *, seed: int) -> None:
        guesses = APPROXIMATE_TOKENS // block_tokens
        holds = settings.closed_loop and settings.working_set and settings.events
        self.placement = Placement(
            policy,
            first_token_timeout_s=CONFIG.first_token_timeout_s,
            approximate_blocks=guesses,
            optimistic=settings.optimistic,
            working_sets=holds,
            seed=seed,
        )
        self.placed: dict[int, Placed] = {}  # requests at replicas
        self.waiting: Waiting[Job] = Waiting(settings.queue_size)
        cache = {"block_size": block_tokens, "total_blocks": settings.capacity_blocks(block_tokens)}
        names = [f"replica-{number}" for number in range(settings.replicas)]
        self.loads = [self.placement.add(name, limit=settings.replica_limit, **cache) for name in names]
        self.candidates = [load.candidate for load in self.loads]
        self._ring = Ring(tuple(names)) if policy == "session" else None
        self._settings = settings
        self._block_size = block_tokens if settings.events else APPROXIMATE
        self._slots = {self._block_size: sum(1 << candidate.slot for candidate in self.candidates)}
        self._resolvers = [Resolver(MODEL, native=True) for _ in names]
        self._tenants: set[Tenant | None] = set()

    def heard(self, replica: int, events: Sequence[KnownEvent]) -> None:
        for change in self._resolvers[replica].apply(events):
            self.placement.index.apply(self.candidates[replica].slot, change)

    def place(self, job: Job, now_s: float) -> bool:
        """Choose the job's replica, and its rank there; return False if none has room."""
        self.placement.expire(now_s)
        session, tenant, came_s = job.request.session, job.request.tenant, job.request.at_s
        self._tenants.add(tenant)
        self.placement.shares.others_may_come = len(self._tenants) > 1
        question, _ = self.placement.question(
            job.prompt, self._slots, now_s, session=session, model=MODEL, came_s=came_s, tenant=tenant
        )
        candidates = self.candidates
        if self._settings.as_served and job.request.replica is not None:
            candidates = [self.candidates[job.request.replica]]
        decision = self.decide(question, candidates)
        job.behind_s, job.stands_back, job.is_cold = question.behind_s, question.stands_back, question.is_cold
        job.held = question if decision.rejection == "held" else None
        if job.is_new:
            room_s = 0.0 if decision.chosen else self.waiting.wait_of(question.counts_from_s, now_s)
            job.is_new, job.outlook = False, self.placement.outlook(decision, room_s)
            job.is_refused = job.outlook is not None and job.outlook.refused_for_s is not None
        if decision.chosen is None or job.is_refused:
            return False
        ranked = self._settings.ranked
        job.replica = self.candidates.index(decision.chosen)
        load = self.loads[job.replica]
        placed = self.placement.sent(decision, load, job.prompt, self._block_size, now_s, ranked=ranked)
        self.placed[job.number] = placed
        job.rank = now_s + (decision.priority_s(now_s) if ranked else 0.0)
        return True

    def decide(self, question: Question, candidates: Sequence[Candidate]) -> Decision:
        return self.placement.decide(question, candidates, self._ring)

    def begun(self, number: int, now_s: float) -> None:
        if (placed := self.placed.get(number)) is not None:
            self.placement.begun(placed, now_s)

    def ended(self, number: int, now_s: float) -> None:
        if (placed := self.placed.pop(number, None)) is not None:
            self.placement.ended(placed, now_s)

    def wait(self, job: Job, now_s: float) -> Job | None:
        """Queue the job until there is room; return the job refused because the queue is full, if any."""
        since_s, priority = job.request.at_s, job.behind_s / STEP_S
        deadline_s = since_s + self._settings.queue_timeout_s
        return self.waiting.offer(job, priority, now_s, deadline_s, since_s=since_s, stands_back=job.stands_back)

    def with_room(self, now_s: float) -> Iterator[Job]:
        """Take out the waiting jobs that have room now; place each before the next."""
        return self.waiting.with_room(now_s, lambda _: self.candidates)
