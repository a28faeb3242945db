"""A simulated router that places by another project's rule, and shows it what that project would know."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from events.native import Load
from lab.simulation.arena.rules import RULES, Asked, Seen
from lab.simulation.job import Job
from lab.simulation.router import SimulatedRouter
from lab.simulation.settings import Settings
from router.placement.cost import INFINITE, Candidate, Question
from router.placement.decision import Decision

SCRAPE_S = 0.05  # the age at which metrics are read again


class ArenaRouter(SimulatedRouter):
    def __init__(
        self, rule: str, settings: Settings, block_tokens: int, *, seed: int, loads: Sequence[Callable[[], Load]]
    ) -> None:
        """`loads`: read the metrics of each replica."""
        super().__init__("round-robin", settings, block_tokens, seed=seed)  # replicas compute in order of arrival
        self._choose = RULES[rule]()
        self._loads = loads
        self._scraped_s = -INFINITE
        self._total_blocks = settings.capacity_blocks(block_tokens)
        self._block_tokens = block_tokens
        self._chance = Random(seed)
        self._seen = [Seen(number, settings.prefill_tokens_per_s) for number in range(settings.replicas)]
        self._sessions: dict[str, int] = {}  # the number of the replica that had the last request
        self._pending: dict[int, int] = {}  # the tokens to prefill of requests without a first token
        self._jobs: dict[int, Job] = {}  # in flight

    def place(self, job: Job, now_s: float) -> bool:
        self._job = job
        if not super().place(job, now_s):
            return False
        one, session, number = self._seen[job.replica], job.request.session, job.number
        self._jobs[number], self._pending[number] = job, self.placed[number].uncached_tokens
        one.in_flight += 1
        one.sent += 1
        one.pending_tokens += self._pending[number]
        one.live.update(job.request.blocks)
        one.tree.update(dict.fromkeys(job.request.blocks, number))
        if session is not None:
            self._sessions[session] = job.replica
        return True

    def decide(self, question: Question, candidates: Sequence[Candidate], **_: Any) -> Decision:
        decision = super().decide(question, candidates)
        if decision.chosen is None:
            return decision
        if question.now_s - self._scraped_s >= SCRAPE_S:
            self._scraped_s = question.now_s
            for one, load in zip(self._seen, (read() for read in self._loads), strict=True):
                one.waiting, one.kv_used = load.waiting, 1 - load.free_blocks / self._total_blocks
        able = [
            self._seen[self.candidates.index(one)]
            for one, cost in zip(candidates, decision.costs, strict=True)
            if cost < INFINITE
        ]
        for one in able:
            slot = self.candidates[one.number].slot
            one.expected = question.matched.get(slot, 0.0)
            one.cached = one.expected - question.awaited.get(slot, 0.0)
        request, last = self._job.request, self._sessions.get(self._job.request.session or "")
        asked = Asked(request.input_tokens, request.blocks, self._block_tokens, self._chance, request.session, last)
        chosen = self._seen[self._choose(asked, able)]
        decision.chosen = self.candidates[chosen.number]
        decision.uncached_tokens = request.input_tokens - chosen.cached
        return decision

    def begun(self, number: int, now_s: float) -> None:
        super().begun(number, now_s)
        self._seen[self._jobs[number].replica].pending_tokens -= self._pending.pop(number)

    def ended(self, number: int, now_s: float) -> None:
        super().ended(number, now_s)
        job = self._jobs.pop(number)
        one = self._seen[job.replica]
        one.in_flight -= 1
        for block in job.request.blocks:
            one.live[block] -= 1
            if not one.live[block]:
                del one.live[block]
