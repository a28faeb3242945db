"""One run against one endpoint, in an open or a closed loop.

Open loop: a request is due at its time, whatever became of those before it, and its latencies count from then. Closed
loop: so many clients, each of which asks as soon as it has its answer.

How much the load generator itself may have delayed is measured, too.
"""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from lab.bench.client import Endpoint, Outcome
from lab.bench.prompts import Form, asked_tokens
from lab.bench.workloads import Arrival, Conversation
from lab.percentiles import percentile
from lab.trace.requests import rest_of_gap_s

LOOK_EVERY_S = 0.01
LAG_LIMIT_S = 0.005
LAG_SHARE = 0.1  # a smaller part of a measured latency may well be the load generator's
CPU_LIMIT = 0.8  # a share of a core


class Overhead(Struct, frozen=True):
    cpu_s: float
    cpu_share: float  # a share of one core
    lag_p99_s: float  # how late its event loop was
    lag_max_s: float

    def delays(self, latency_p99_s: float | None) -> bool:
        return latency_p99_s is not None and self.lag_p99_s > max(LAG_LIMIT_S, LAG_SHARE * latency_p99_s)

    @property
    def is_busy(self) -> bool:
        return self.cpu_share > CPU_LIMIT


class OverheadMeter:
    """Measures from its creation until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lags_s: list[float] = []
        self._began_s = self._last_s = time.perf_counter()
        self._cpu_s = time.process_time()
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        now_s = time.perf_counter()
        self._lags_s.append(max(0.0, now_s - self._last_s - LOOK_EVERY_S))
        self._last_s = now_s
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def stop(self) -> Overhead:
        self._timer.cancel()
        self._lags_s.append(max(0.0, time.perf_counter() - self._last_s - LOOK_EVERY_S))
        cpu_s = time.process_time() - self._cpu_s
        lags_s = sorted(self._lags_s)
        return Overhead(
            cpu_s=cpu_s,
            cpu_share=cpu_s / max(time.perf_counter() - self._began_s, 1e-9),
            lag_p99_s=percentile(lags_s, 0.99),
            lag_max_s=lags_s[-1],
        )


Witness: TypeAlias = Callable[[Outcome, str, bytes], Awaitable[None]]  # sees a request before it is sent: path, body
REST_AFTER_ERROR_S = 0.1  # a client in closed loop does not ask a dead endpoint a thousand times a second


class Limits(NamedTuple):
    """The limits of a run; all that are given hold, for counted requests."""

    requests: int | None = None
    for_s: float | None = None
    warm_up: int = 0  # the first requests, which are not counted
    clients: int | None = None  # None: open loop
    comes_again: bool = False  # one that is told to, with status 429 and Retry-After


class RunResult(NamedTuple):
    """The outcomes of a run, in the order in which requests ended."""

    outcomes: list[Outcome]
    unfinished: int  # interrupted
    was_interrupted: bool
    own: Overhead


class LoadGenerator:
    def __init__(
        self,
        endpoint: Endpoint,
        form: Form,
        arrivals: Iterator[Arrival],
        limits: Limits,
        on_end: Callable[[int], object],
        witness: Witness | None = None,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._limits = limits
        self._on_end = on_end  # is told how many requests have ended
        self._witness = witness
        self._endpoint = endpoint
        self._form = form
        self._arrivals = arrivals
        self._began_s = 0.0
        self._sent = 0
        self._counted = 0
        self._until_s: float | None = None  # no counted request is sent after
        self._deadline: asyncio.TimerHandle | None = None
        self._is_over = asyncio.Event()  # nothing more is sent
        self._unfinished = 0

    async def run(self) -> RunResult:
        freezes = gc.get_freeze_count() == 0  # otherwise the program around this has done it already
        if freezes:
            gc.collect()
            gc.freeze()  # older objects need not be looked through again and again
        watch, was_interrupted = OverheadMeter(), False
        self._began_s = time.perf_counter()
        self._on_end(0)
        try:
            async with asyncio.TaskGroup() as group:
                if self._limits.clients is None:
                    group.create_task(self._arrive(group))
                for _ in range(self._limits.clients or 0):
                    group.create_task(self._ask_in_turn())
        except asyncio.CancelledError:  # Ctrl-C, of which `asyncio.Runner` makes this
            task = asyncio.current_task()
            assert task is not None, "somebody waits"
            task.uncancel()
            was_interrupted = True
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
            if freezes:
                gc.unfreeze()
        return RunResult(self.outcomes, self._unfinished, was_interrupted, watch.stop())

    async def _arrive(self, group: asyncio.TaskGroup) -> None:
        for arrival in self._arrivals:
            if not await self._wait_until(arrival.at_s):
                return
            group.create_task(self._converse(arrival.talk, arrival.at_s))

    async def _ask_in_turn(self) -> None:
        """Begin conversations as a client in closed loop, one after the other."""
        while not self._is_over.is_set() and (arrival := next(self._arrivals, None)) is not None:
            outcome = await self._converse(arrival.talk, self._now_s())
            if outcome is None:
                return
            if outcome.error:
                await self._wait_until(self._now_s() + REST_AFTER_ERROR_S)

    async def _converse(self, talk: Conversation, at_s: float) -> Outcome | None:
        """Ask turn by turn; return the last outcome, None if no more requests are sent."""
        outcome: Outcome | None = None
        answers: tuple[str, ...] = ()
        session = talk.name if len(talk.turns) > 1 or talk.is_recorded else ""
        for number, turn in enumerate(talk.turns):
            if outcome is not None:
                answer_s = outcome.end_s - (outcome.first_s or outcome.end_s)
                at_s = outcome.end_s + (rest_of_gap_s(turn.think_s, answer_s) if talk.is_recorded else turn.think_s)
                if not await self._wait_until(at_s):
                    break
            outcome = self._outcome(talk, number, at_s)
            if outcome is None:
                break
            outcome.session_turns = len(talk.turns) if session else 0
            body = self._form.body(talk, number, answers)
            if self._witness is not None:
                await self._witness(outcome, self._form.path, body)
            while True:
                asked = self._endpoint.ask(self._form.path, body, outcome, self._began_s, session)
                try:
                    await asked.ended
                except asyncio.CancelledError:
                    self._unfinished += 1
                    asked.abandon()
                    raise
                pause_s = outcome.retry_after_s if self._limits.comes_again else None
                if pause_s is None or (self._until_s is not None and self._now_s() + pause_s >= self._until_s):
                    break
                await asyncio.sleep(pause_s)
                outcome.comes_again()
            answers = (*answers, "".join(asked.said))
            self.outcomes.append(outcome)
            self._on_end(len(self.outcomes))
        return outcome

    def _outcome(self, talk: Conversation, number: int, intended_s: float) -> Outcome | None:
        """Return the outcome of a new request; None if no more are sent."""
        if self._is_over.is_set() or (self._until_s is not None and intended_s >= self._until_s):
            return None
        is_warm_up = self._sent < self._limits.warm_up
        self._sent += 1
        if not is_warm_up:
            if self._counted == 0 and self._limits.for_s is not None:
                self._until_s = intended_s + self._limits.for_s
                left_s = self._until_s - self._now_s()
                self._deadline = asyncio.get_running_loop().call_later(left_s, self._is_over.set)
            self._counted += 1
            if self._counted == self._limits.requests:
                self._is_over.set()
        return Outcome(talk.name, number, is_warm_up, intended_s, asked_tokens=asked_tokens(talk, number))

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def _wait_until(self, at_s: float) -> bool:
        """Return false at once when nothing more is sent, and true at that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, at_s - self._now_s())):
                await self._is_over.wait()
        return not self._is_over.is_set()
