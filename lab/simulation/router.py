"""A router of the simulated fleet: the shipped index, optimistic entries, loads and policies, without HTTP."""

import random
from collections.abc import Sequence

from events.messages import KnownEvent
from events.native import Load
from events.resolver import Resolver
from lab.simulation.job import MODEL, Job
from lab.simulation.settings import Settings
from router.placement.ages import CacheAges, pages_of
from router.placement.approximate import Approximate
from router.config import RouterConfig
from router.placement.index import PrefixIndex
from router.placement.load import ReplicaLoad
from router.placement.optimistic import awaited_s
from router.placement.policy import Candidate, Question, choose
from router.placement.reuse import Reuse
from router.placement.ring import Ring

CONFIG = RouterConfig()
APPROXIMATE_TOKENS = 2**20  # that a router takes a replica to hold that says nothing


class Router:
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
        self._policy = policy
        self._block_tokens = block_tokens
        self._index = PrefixIndex()
        self._slots = [self._index.add() for _ in names]
        self._mask = sum(1 << slot for slot in self._slots)
        self._resolvers = [Resolver(MODEL, native=True) for _ in names]
        self._approximate = None if settings.events else Approximate(self._index, APPROXIMATE_TOKENS // block_tokens)
        self._reuse = Reuse()
        self._ages = [CacheAges(self._reuse) for _ in names]
        self._candidates = [
            Candidate(name, slot, ages=ages) for name, slot, ages in zip(names, self._slots, self._ages, strict=True)
        ]
        self._loads = [
            ReplicaLoad(candidate, block_size=block_tokens, total_blocks=capacity_blocks)
            for candidate in self._candidates
        ]
        self._ring = Ring(names)
        self._rng = random.Random(seed)
        self._turn = 0
        self._is_optimistic = settings.optimistic

    def place(self, job: Job, now_s: float) -> int:
        """The replica's number; the job has the rank that its queue is to give it."""
        optimistic = self._index.optimistic
        optimistic.expire(now_s)
        keys = job.prompt.keys()
        found, size = self._index.match(keys, self._mask), self._block_tokens
        matched: dict[int, float] = {slot: blocks * size for slot, blocks in found.gpu.items()}
        awaited = {slot: (blocks - found.sure.get(slot, 0)) * size for slot, blocks in found.gpu.items()}
        tokens = job.request.input_tokens
        self._turn += 1
        question = Question(tokens, matched, matched, turn=self._turn, now_s=now_s, awaited=awaited)
        decision = choose(self._policy, question, self._candidates, self._rng, self._ring)
        assert decision.chosen is not None, "a simulated replica is never away"
        number = self._candidates.index(decision.chosen)
        slot = self._slots[number]
        job.rank = now_s + decision.later_s
        uncached_tokens = max(1, tokens - int(matched.get(slot, 0)))
        self._loads[number].sent(job.number, uncached_tokens, now_s, priority_s=decision.later_s)
        pages = pages_of(keys, self._block_tokens)
        self._reuse.used(pages, now_s)
        self._ages[number].routed(pages, now_s)
        if self._approximate is not None:
            self._approximate.routed(slot, keys)
        elif self._is_optimistic:
            optimistic.add(slot, keys, now_s + awaited_s(CONFIG.optimistic_ttl_s, decision.ttft_s))
        return number

    def begun(self, job: Job, now_s: float) -> None:
        self._loads[job.replica].begun(job.number, now_s)

    def ended(self, job: Job, now_s: float) -> None:
        self._loads[job.replica].ended(job.number, now_s)

    def reported(self, replica: int, load: Load, now_s: float) -> None:
        self._loads[replica].reported(load, now_s)

    def heard(self, replica: int, events: Sequence[KnownEvent]) -> None:
        for change in self._resolvers[replica].apply(events):
            self._index.apply(self._slots[replica], change)
