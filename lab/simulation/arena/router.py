"""A simulated router that places by another project's rule, and shows it what that project would know."""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

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
        self._loads, self._scraped_s = loads, -INFINITE
        self._chance = Random(seed)
        self._seen = [Seen(number, settings.prefill_tokens_per_s) for number in range(settings.replicas)]
        self._sessions: dict[str, int] = {}  # the number of the replica that had the last request
        self._jobs: dict[int, Job] = {}  # those that have not ended

    def place(self, job: Job, now_s: float) -> bool:
        self._job = job
        if not super().place(job, now_s):
            return False
        self._jobs[job.number] = job
        one = self._seen[job.replica]
        one.sent += 1
        one.pending_tokens += self.placed[job.number].uncached_tokens
        one.live.update(job.request.blocks)
        one.tree.update(dict.fromkeys(job.request.blocks, job.number))
        if job.request.session is not None:
            self._sessions[job.request.session] = job.replica
        return True

    def decide(self, question: Question, candidates: Sequence[Candidate]) -> Decision:
        decision = super().decide(question, candidates)
        if decision.chosen is None:
            return decision
        request, block_tokens = self._job.request, self._job.prompt.block_tokens
        if question.now_s - self._scraped_s >= SCRAPE_S:
            self._scraped_s = question.now_s
            total_blocks = self._settings.capacity_blocks(block_tokens)
            for one, load in zip(self._seen, (read() for read in self._loads), strict=True):
                one.waiting, one.kv_used = load.waiting, 1 - load.free_blocks / total_blocks
        able = []
        for candidate, cost in zip(candidates, decision.costs, strict=True):
            if cost < INFINITE:
                one = self._seen[self.candidates.index(candidate)]
                one.in_flight = candidate.in_flight
                one.expected = question.matched.get(candidate.slot, 0.0)
                one.cached = one.expected - question.awaited.get(candidate.slot, 0.0)
                able.append(one)
        last = self._sessions.get(request.session or "")
        asked = Asked(request.input_tokens, request.blocks, block_tokens, self._chance, request.session, last)
        chosen = self._seen[self._choose(asked, able)]
        decision.chosen = self.candidates[chosen.number]
        decision.uncached_tokens = request.input_tokens - chosen.cached
        return decision

    def begun(self, number: int, now_s: float) -> None:
        self._seen[self._jobs[number].replica].pending_tokens -= self.placed[number].uncached_tokens
        super().begun(number, now_s)

    def ended(self, number: int, now_s: float) -> None:
        super().ended(number, now_s)
        job = self._jobs.pop(number)
        self._seen[job.replica].live -= Counter(job.request.blocks)
