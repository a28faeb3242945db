"""A router of the simulated fleet: the shipped placement and queue for room, without HTTP."""

from collections.abc import Callable, Iterator, Sequence

from events.cache.resolver import Resolver
from events.messages import KnownEvent
from events.native import Load
from lab.simulation.job import MODEL, Job
from lab.simulation.settings import CONFIG, Settings
from replica.messages import KVSource
from router.placement.cost import Candidate, Half, Question, Tenant
from router.placement.decision import Decision
from router.placement.elsewhere import fetch, split, why_not_at_all
from router.placement.index import APPROXIMATE, APPROXIMATE_TOKENS
from router.placement.load import Placed
from router.placement.outbox import Outbox, PeerBatch
from router.placement.placement import Placement
from router.placement.policy import Ring
from router.placement.waiting import STEP_S, Waiting
from router.workers.peer_inbox import Inbox


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
        number: int = 0,
        wake: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`number`: among its peers. `wake` is called with the seconds within which to ask what it tells them."""
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
        if settings.prefill_replicas:
            for number, candidate in enumerate(self._candidates):
                candidate.role = "prefill" if number < settings.prefill_replicas else "decode"
        self._as_served, self._ranked = settings.as_served, settings.ranked
        self._splits = settings.prefill_replicas > 0
        if settings.pull_tokens_per_s:
            for number, load in enumerate(self._loads):
                self._placement.offers(load, str(number), MODEL)
        self._block_size = block_tokens if settings.events else APPROXIMATE
        self._slots = {self._block_size: sum(1 << candidate.slot for candidate in self._candidates)}
        self._resolvers = [Resolver(MODEL, native=True) for _ in names]
        self._ring = Ring(names)
        self._queue_timeout_s = settings.queue_timeout_s
        self._placed: dict[int, Placed] = {}  # by the job's number
        self._tenants: set[Tenant | None] = set()
        self._inbox = Inbox(self._placement, dict(zip(names, self._loads, strict=True)).get, own=number)
        if settings.peer_delay_s is not None:
            self._placement.outbox = Outbox(number, wake)

    def takes(self, replica: int, why_not: str | None) -> None:
        """Note that a replica takes requests from now on, or the reason why it does not."""
        self._candidates[replica].unavailable = why_not

    def pause_s(self) -> float:
        """Return how long a job waits for its router's turn."""
        return self._placement.pause_s(self._candidates)

    def place(self, job: Job, now_s: float) -> Job | None:
        """Choose the job's replica, and its rank there; return what to send: it, or its first half. None: no room."""
        self._placement.expire(now_s)
        question = self._question(job, now_s)
        if job.prefill is not None:
            fetch(question, self._candidates, self._candidates[job.prefill.replica])
        allowed: Sequence[Candidate] = self._candidates
        if self._as_served and job.request.replica is not None:
            allowed = [self._candidates[job.request.replica]]
        decision = self._placement.decide(question, allowed, self._ring)
        job.behind_s, job.stands_back = question.behind_s, question.stands_back
        if job.is_new:
            room_s = 0.0 if decision.chosen else self.waiting.wait_of(question.counts_from_s, now_s)
            job.is_new, job.outlook = False, self._placement.outlook(decision, room_s)
            job.is_refused = job.outlook is not None and job.outlook.refused_for_s is not None
        if decision.chosen is None or job.is_refused:
            return None
        if self._splits and job.prefill is None and why_not_at_all("auto", decision) is None:
            computing = self._placement.decide(self._question(job, now_s, "prefill"), self._candidates, policy="cost")
            if split("auto", decision, computing, self._placement.transfers).elsewhere:
                half = job.first_half()
                self._send(half, computing, now_s)
                return half
        self._send(job, decision, now_s)
        return job

    def _question(self, job: Job, now_s: float, half: Half = "decode") -> Question:
        session, came_s, counts = job.request.session, job.request.at_s, half == "decode" and job.prefill is None
        tenant = job.request.tenant
        self._tenants.add(tenant)
        self._placement.shares.others_may_come = len(self._tenants) > 1
        question, _ = self._placement.question(
            job.prompt, self._slots, now_s, session=session, came_s=came_s, half=half, counts=counts, tenant=tenant
        )
        return question

    def _send(self, job: Job, decision: Decision, now_s: float) -> None:
        assert decision.chosen is not None, "its caller has looked"
        job.replica = self._candidates.index(decision.chosen)
        job.sources = [KVSource(one.endpoint, one.tokens) for one in decision.neighbours]
        load = self._loads[job.replica]
        placed = self._placement.sent(decision, load, job.prompt, self._block_size, now_s, ranked=self._ranked)
        self._placed[job.number] = placed
        job.rank = now_s + (decision.priority_s(now_s) if self._ranked else 0.0)

    def wait(self, job: Job, now_s: float) -> Job | None:
        """Queue the job until there is room; return the job refused because the queue is full, if any."""
        since_s = job.request.at_s
        return self.waiting.offer(
            job,
            job.behind_s / STEP_S,
            now_s,
            since_s + self._queue_timeout_s,
            since_s=since_s,
            stands_back=job.stands_back,
        )

    def with_room(self, now_s: float) -> Iterator[Job]:
        """Take out the waiting jobs that have room now; place each before the next."""
        return self.waiting.with_room(now_s, lambda _: self._candidates)

    def begun(self, job: Job, now_s: float) -> None:
        self._placement.begun(self._placed[job.number], now_s)
        self._placement.came(job.request.tenant, job.outlook, now_s - job.request.at_s)

    def ended(self, job: Job, now_s: float) -> None:
        placed = self._placed.pop(job.number)
        self._placement.used([placed], 0, job.request.output_tokens)
        self._placement.ended(placed, now_s)

    def reported(self, replica: int, load: Load, now_s: float) -> None:
        self._loads[replica].reported(load, now_s)

    def tells(self, now_s: float) -> list[PeerBatch]:
        """Return what its peers are to hear now."""
        return [] if self._placement.outbox is None else self._placement.outbox.take(now_s, now_s)

    def told(self, batch: PeerBatch, now_s: float) -> bool:
        """Return True if a replica may have room that it had not."""
        return self._inbox.hear(batch, now_s, now_s)

    def heard(self, replica: int, events: Sequence[KnownEvent]) -> None:
        for change in self._resolvers[replica].apply(events):
            self._placement.index.apply(self._candidates[replica].slot, change)
