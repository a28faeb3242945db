"""A router and its replicas in virtual time."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import floor

from msgspec.structs import replace

from events.messages import KnownEvent
from lab.simulation.arena.router import ArenaRouter
from lab.simulation.arena.rules import RULES
from lab.simulation.job import MODEL, Job, jobs_of
from lab.simulation.replica import Agenda, SimulatedReplica
from lab.simulation.router import SimulatedRouter
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, rest_of_gap_s
from router.placement.cost import Question
from router.placement.sessions import name_of

REPORT_INTERVAL_S = 0.25  # replica.process has the same
TICK_S = 0.25  # the router's sweep
ROUNDING = 1e-3  # a share of an interval: a time this close to a report counts as past it


class SimulatedFleet:
    def __init__(self, settings: Settings, policy: str, block_tokens: int, seed: int) -> None:
        self._agenda = Agenda()
        self._left = 0  # jobs that have not ended
        self._settings = settings
        self._replicas = [
            SimulatedReplica(number, settings, block_tokens, self._agenda, self) for number in range(settings.replicas)
        ]
        if policy in RULES:
            loads = [replica.load for replica in self._replicas]
            self._router: SimulatedRouter = ArenaRouter(policy, settings, block_tokens, seed=seed, loads=loads)
        else:
            self._router = SimulatedRouter(policy, settings, block_tokens, seed=seed)
        self._reports = [False] * settings.replicas  # whether a report is due
        self._then: dict[int, Callable[[], None]] = {}  # next turns in a closed loop, by the job before
        self._held: dict[str, Job] = {}  # first turns of sessions that may not begin yet

    # ---- a run

    def run(self, jobs: Sequence[Job], on_request: Callable[[], None]) -> None:
        self._left = len(jobs)
        before: dict[str | int, Job] = {}  # the last turn of each session so far
        for job in jobs:
            whose = (job.request.session if self._settings.closed_loop else None) or job.number
            last, before[whose] = before.get(whose), job
            if last is None:
                self._agenda.at(job.request.at_s, partial(self._arrive, job, on_request))
            else:
                answer_s = last.request.output_tokens / self._settings.decode_tokens_per_s
                gap_s = rest_of_gap_s(job.request.at_s - last.request.at_s, answer_s)
                self._then[last.number] = partial(self._agenda.after, gap_s, partial(self._arrive, job, on_request))
        if self._settings.closed_loop:
            self._begin_sessions()
        while self._left and self._agenda.step():
            pass
        assert not self._left, f"{self._left} requests wait for ever"

    def _arrive(self, job: Job, on_request: Callable[[], None]) -> None:
        job.request = job.request._replace(at_s=self._agenda.now_s)  # a closed loop has its own times
        if pause_s := self._router.placement.pause_s(self._router.candidates):
            self._agenda.after(pause_s, partial(self._place_or_wait, job))
        else:
            self._place_or_wait(job)
        on_request()

    def _over(self, job: Job) -> None:
        self._left -= 1
        if then := self._then.pop(job.number, None):
            then()

    def _place_or_wait(self, job: Job) -> None:
        if self._place(job):
            return
        if job.is_refused:
            self._refuse([job])
        elif job.held is not None:
            self._hold(job, job.held)
        else:
            refused = self._router.wait(job, self._agenda.now_s)
            self._refuse([] if refused is None else [refused])
            expire = self._router.waiting.expire
            self._agenda.after(self._settings.queue_timeout_s, lambda: self._refuse(expire(self._agenda.now_s)))

    def _hold(self, job: Job, question: Question) -> None:
        """Keep a session's first turn; its client comes again when it was told to."""
        working_set, name = self._router.placement.working_sets[MODEL], name_of(question)
        until_s = self._agenda.now_s + self._settings.queue_timeout_s
        working_set.wait(question, until_s)
        self._held[name] = job

        def leave() -> None:
            if self._held.get(name) is job:
                del self._held[name]
                wait_s = working_set.come_again_s(name, self._agenda.now_s)
                self._agenda.after(wait_s, partial(self._place_or_wait, job))

        self._agenda.at(until_s, leave)

    def _begin_sessions(self) -> None:
        for working_set in self._router.placement.working_sets.values():
            for name in working_set.tick(self._agenda.now_s, self._router.candidates):
                if (job := self._held.pop(name, None)) is not None:
                    self._place_or_wait(job)
        self._agenda.after(TICK_S, self._begin_sessions)

    def _place(self, job: Job) -> bool:
        """Send the job to a replica; return False if none has room."""
        if not self._router.place(job, self._agenda.now_s):
            return False
        self._replicas[job.replica].submit(job)
        self._report_soon(job.replica)
        return True

    def _refuse(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.is_refused = True
            self._over(job)

    # ---- what replicas do

    def _report_soon(self, number: int) -> None:
        """Schedule the replica's next report; without queued prefill, only a request's progress calls for another."""
        if self._settings.events and not self._reports[number]:
            self._reports[number] = True
            offset_s = REPORT_INTERVAL_S * number / len(self._replicas)
            passed = floor((self._agenda.now_s - offset_s) / REPORT_INTERVAL_S + ROUNDING)
            self._agenda.at(offset_s + (passed + 1) * REPORT_INTERVAL_S, partial(self._report, number))

    def _report(self, number: int) -> None:
        load = self._replicas[number].load()
        self._router.loads[number].reported(load, self._agenda.now_s)
        self._reports[number] = False
        if load.queued_prefill_tokens:
            self._report_soon(number)

    def published(self, replica: int, events: Sequence[KnownEvent]) -> None:
        if self._settings.events:
            self._router.heard(replica, events)

    def begun(self, job: Job) -> None:
        self._report_soon(job.replica)
        now_s = self._agenda.now_s
        self._router.begun(job.number, now_s)
        self._router.placement.came(job.request.tenant, job.outlook, now_s - job.request.at_s)

    def ended(self, job: Job) -> None:
        job.ended_s = self._agenda.now_s
        self._report_soon(job.replica)
        router = self._router
        placed = [router.placed[job.number]]
        router.placement.used(placed, job.uncached_tokens, job.request.output_tokens, job.ended_s)
        router.ended(job.number, job.ended_s)
        self._over(job)
        for waiting in router.with_room(self._agenda.now_s):
            self._place(waiting)


def simulated(
    trace: Trace, settings: Settings, policy: str, seed: int, on_request: Callable[[], None] = lambda: None
) -> list[Job]:
    """Run the trace; return its jobs in order of arrival. Raise ValueError if a request can never run."""
    settings.check(trace)
    # More than all requests together fill makes no difference, and is not allocated.
    most = sum(-(-request.input_tokens // trace.block_tokens) for request in trace.requests) * trace.block_tokens
    settings = replace(settings, capacity_tokens=min(settings.capacity_tokens, most))
    jobs = list(jobs_of(trace))
    SimulatedFleet(settings, policy, trace.block_tokens, seed).run(jobs, on_request)
    return jobs
