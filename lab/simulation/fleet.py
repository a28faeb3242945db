"""Routers and replicas in virtual time."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import floor
from random import Random

from msgspec.structs import replace

from events.messages import KnownEvent
from lab.replay import Agenda
from lab.simulation.job import Job, jobs_of
from lab.simulation.replica import SimulatedReplica
from lab.simulation.router import SimulatedRouter
from lab.simulation.settings import Settings
from lab.trace.requests import Trace

REPORT_INTERVAL_S = 0.25  # replica.process has the same
LONGEST_GAP_S = 120.0  # the limit in a closed loop: nobody simulates the night until a user comes back
ROUNDING = 1e-3  # a share of an interval: a time this close to a report counts as past it


class SimulatedFleet:
    def __init__(self, settings: Settings, policy: str, block_tokens: int, seed: int) -> None:
        self.agenda = Agenda()
        self.left = 0  # jobs that have not ended
        self._settings = settings
        self._chance = Random(seed)
        numbers = range(settings.replicas)
        self.replicas = [SimulatedReplica(number, settings, block_tokens, self.agenda, self) for number in numbers]
        self.routers = [
            SimulatedRouter(policy, settings, block_tokens, seed=seed + number) for number in range(settings.routers)
        ]
        self._reports = [False] * settings.replicas  # whether a report is due
        self._held_back: list[list[KnownEvent]] = [[] for _ in numbers]  # lost batches, delivered with the next one
        self._then: dict[int, Callable[[], None]] = {}  # next turns in a closed loop, by the job before
        self._tells = [settings.prefill_tokens_per_s * (1 + (-1) ** number * settings.rate_error) for number in numbers]

    # ---- a run

    def run(self, jobs: Sequence[Job], on_request: Callable[[], None]) -> None:
        self.left = len(jobs)
        before: dict[str | int, Job] = {}  # the last turn of each session so far
        for job in jobs:
            whose = (job.request.session if self._settings.closed_loop else None) or job.number
            last, before[whose] = before.get(whose), job
            if last is None:
                self.agenda.at(job.request.at_s, partial(self.arrive, job, on_request))
            else:
                gap_s = min(LONGEST_GAP_S, job.request.at_s - last.request.at_s)
                self._then[last.number] = partial(self.agenda.after, gap_s, partial(self._next_turn, job, on_request))
        self.finish()

    def finish(self) -> None:
        while self.left and self.agenda.step():
            pass
        assert not self.left, f"{self.left} requests wait for ever"

    def arrive(self, job: Job, on_request: Callable[[], None] = lambda: None) -> None:
        job.router = job.number % len(self.routers)
        router = self.routers[job.router]
        if pause_s := router.placement.pause_s(router.candidates):
            self.agenda.after(pause_s, partial(self._place_or_wait, job))
        else:
            self._place_or_wait(job)
        on_request()

    def _next_turn(self, job: Job, on_request: Callable[[], None]) -> None:
        job.request = job.request._replace(at_s=self.agenda.now_s)
        self.arrive(job, on_request)

    def _over(self, job: Job) -> None:
        self.left -= 1
        if then := self._then.pop(job.number, None):
            then()

    def _place_or_wait(self, job: Job) -> None:
        if self._place(job):
            return
        if job.is_refused:
            self._refuse([job])
        else:
            refused = self.routers[job.router].wait(job, self.agenda.now_s)
            self._refuse([] if refused is None else [refused])
            expire = self.routers[job.router].waiting.expire
            self.agenda.after(self._settings.queue_timeout_s, lambda: self._refuse(expire(self.agenda.now_s)))

    def _place(self, job: Job) -> bool:
        """Send the job to a replica; return False if none has room."""
        if not self.routers[job.router].place(job, self.agenda.now_s):
            return False
        self.replicas[job.replica].submit(job)
        self._report_soon(job.replica)
        return True

    def _refuse(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.is_refused = True
            self._over(job)

    def _report_soon(self, number: int) -> None:
        """Schedule the replica's next report; without queued prefill, only a request's progress calls for another."""
        if self._settings.events and not self._reports[number]:
            self._reports[number] = True
            offset_s = REPORT_INTERVAL_S * number / len(self.replicas)
            passed = floor((self.agenda.now_s - offset_s) / REPORT_INTERVAL_S + ROUNDING)
            self.agenda.at(offset_s + (passed + 1) * REPORT_INTERVAL_S, partial(self._report, number))

    def _report(self, number: int) -> None:
        load = self.replicas[number].load()
        now_s = self.agenda.now_s
        if load.prefill_tokens_per_s and self._settings.rate_error:
            load = replace(load, prefill_tokens_per_s=self._tells[number])
        for router in self.routers:
            router.replicas[number].load.reported(load, now_s)
        self._reports[number] = False
        if load.queued_prefill_tokens:
            self._report_soon(number)

    # ---- what replicas do

    def published(self, replica: int, events: Sequence[KnownEvent]) -> None:
        if not self._settings.events:
            return
        held_back = self._held_back[replica]
        held_back += events
        if self._chance.random() < self._settings.event_loss:
            return
        self._held_back[replica] = []

        def deliver() -> None:
            for router in self.routers:
                router.heard(replica, held_back)

        if self._settings.event_delay_s:
            self.agenda.after(self._settings.event_delay_s, deliver)
        else:
            deliver()

    def begun(self, job: Job) -> None:
        self._report_soon(job.replica)
        now_s, router = self.agenda.now_s, self.routers[job.router]
        router.begun(job.number, now_s)
        router.placement.came(job.request.tenant, job.outlook, now_s - job.request.at_s)

    def ended(self, job: Job) -> None:
        job.ended_s = self.agenda.now_s
        self._report_soon(job.replica)
        router = self.routers[job.router]
        router.placement.used([router.placed[job.number]], 0, job.request.output_tokens)
        router.ended(job.number, job.ended_s)
        self._over(job)
        for waiting in router.with_room(self.agenda.now_s):
            self._place(waiting)


def simulated(
    trace: Trace, settings: Settings, policy: str, seed: int, on_request: Callable[[], None] = lambda: None
) -> list[Job]:
    """Run the trace; return its jobs in order of arrival. Raise ValueError if a request can never run."""
    settings.check(trace)
    settings = replace(settings, capacity_tokens=min(settings.capacity_tokens, settings.most_tokens(trace)))
    jobs = list(jobs_of(trace))
    SimulatedFleet(settings, policy, trace.block_tokens, seed).run(jobs, on_request)
    return jobs
