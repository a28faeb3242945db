"""One run against one endpoint, in an open or a closed loop.

Open loop: a request is due at its time, whatever became of those before it, and its latencies count from then. Closed
loop: so many clients, each of which asks as soon as it has its answer.

How much the load generator itself may have delayed is measured, too.
"""

import asyncio
import gc
import time
from bisect import insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec import Struct

from lab.bench.client import Endpoint, InFlight
from lab.bench.outcome import Outcome
from lab.bench.prompts import Form, asked_tokens
from lab.bench.workloads import Arrival, Conversation
from lab.percentiles import ordered, percentile

LOOK_EVERY_S = 0.01
LAG_LIMIT_S = 0.005
LAG_SHARE = 0.1  # of a measured latency: a smaller part of it may well be the load generator's
CPU_LIMIT = 0.8  # of a core


class Overhead(Struct, frozen=True):
    cpu_s: float
    cpu_share: float  # of one core
    cpu_per_request_s: float
    cpu_per_output_token_s: float
    lag_p99_s: float  # how late its event loop was
    lag_max_s: float

    def delays(self, latency_p99_s: float | None) -> bool:
        """Return whether a notable part of this latency may be the lag."""
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

    def stop(self, requests: int, output_tokens: int) -> Overhead:
        self._timer.cancel()
        self._lags_s.append(max(0.0, time.perf_counter() - self._last_s - LOOK_EVERY_S))
        cpu_s = time.process_time() - self._cpu_s
        lags_s = ordered(self._lags_s)
        return Overhead(
            cpu_s=cpu_s,
            cpu_share=cpu_s / max(time.perf_counter() - self._began_s, 1e-9),
            cpu_per_request_s=cpu_s / max(1, requests),
            cpu_per_output_token_s=cpu_s / max(1, output_tokens),
            lag_p99_s=percentile(lags_s, 0.99),
            lag_max_s=lags_s[-1],
        )


REST_AFTER_ERROR_S = 0.1  # of a client in closed loop: an endpoint that is gone is not asked a thousand times a second


class WarmUp(NamedTuple):
    """The first requests, which are not counted."""

    requests: int = 0
    s: float = 0.0


class Limits(NamedTuple):
    """The limits of a run; all that are given hold, for counted requests."""

    requests: int | None = None
    for_s: float | None = None
    warm_up: WarmUp = WarmUp()
    clients: int | None = None  # None: open loop


class RunResult(NamedTuple):
    """The outcomes of a run, in the order in which requests ended."""

    outcomes: list[Outcome]
    unfinished: int  # interrupted
    was_interrupted: bool
    own: Overhead


class LoadGenerator:
    def __init__(self, endpoint: Endpoint, form: Form, arrivals: Iterator[Arrival], limits: Limits) -> None:
        self.outcomes: list[Outcome] = []
        self.ttfts_s: list[float] = []  # ascending
        self.errors = 0
        self.done = 0  # counted ones
        self.limits = limits
        self._endpoint = endpoint
        self._form = form
        self._arrivals = arrivals
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._began_s = 0.0
        self._sent = 0
        self._counted = 0
        self._until_s: float | None = None  # no counted request is sent after
        self._deadline: asyncio.TimerHandle | None = None
        self._is_over = False  # nothing more is sent
        # Each conversation, each client in closed loop, and the wait for the next arrival either has a request in
        # flight or a timer. The run is over when there is none left.
        self._open = 0
        self._timers: set[asyncio.TimerHandle] = set()
        self._unfinished = 0
        self._was_interrupted = False

    @property
    def in_flight(self) -> int:
        return len(self._endpoint.in_flight)

    @property
    def left_s(self) -> float | None:
        """Seconds in which counted requests are still sent; None before the first, or without such a limit."""
        return None if self._until_s is None else max(0.0, self._until_s - self._now_s())

    async def run(self) -> RunResult:
        freezes = gc.get_freeze_count() == 0  # otherwise the program around this has done it already
        if freezes:
            gc.collect()
            gc.freeze()  # what is there already need not be looked through again and again
        watch = OverheadMeter()
        self._began_s = time.perf_counter()
        if self.limits.clients is None:
            self._open += 1
            self._due(None)
        else:
            self._open += self.limits.clients
            for _ in range(self.limits.clients):
                self._loop.call_soon(self._free)
        try:
            await self._ended
        finally:
            self._end_all()
            if freezes:
                gc.unfreeze()
        output_tokens = sum(outcome.output_tokens or 0 for outcome in self.outcomes)
        own = watch.stop(len(self.outcomes), output_tokens)
        return RunResult(self.outcomes, self._unfinished, self._was_interrupted, own)

    def interrupt(self) -> None:
        """End it at once; cancel requests in flight."""
        if not self._ended.done():
            self._was_interrupted = True
            self._unfinished = self.in_flight
            self._end_all()
            self._ended.set_result(None)

    def _end_all(self) -> None:
        self._enough()
        for asked in list(self._endpoint.in_flight):
            asked.abandon()

    def _enough(self) -> None:
        """Send nothing more, and cancel the pauses of conversations."""
        self._is_over = True
        self._open -= len(self._timers)
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._deadline is not None:
            self._deadline.cancel()

    # ---- what comes next

    def _due(self, arrival: Arrival | None) -> None:
        """Begin the conversation, then wait until the next one is due. Other tasks run in between."""
        if arrival is not None:
            self._begin(arrival.talk, arrival.at_s)
        following = None if self._is_over else next(self._arrivals, None)
        if following is None:
            self._close()
            return
        self._at(following.at_s, lambda: self._due(following))

    def _free(self) -> None:
        """Start a client's next request in a closed loop, or end the client."""
        arrival = None if self._is_over else next(self._arrivals, None)
        if arrival is not None:
            self._begin(arrival.talk, self._now_s())
        self._close()

    def _begin(self, talk: Conversation, at_s: float) -> None:
        self._open += 1
        self._turn(talk, 0, (), at_s)

    def _turn(self, talk: Conversation, number: int, answers: tuple[str, ...], intended_s: float) -> None:
        outcome = self._outcome(talk, number, intended_s)
        if outcome is None:
            self._close()
            return
        session = talk.name if len(talk.turns) > 1 else ""
        body = self._form.body(talk, number, answers)

        def ended(asked: InFlight) -> None:
            self._answered(asked, talk, number, answers)

        self._endpoint.ask(self._form.path, body, outcome, self._began_s, ended, session)

    def _outcome(self, talk: Conversation, number: int, intended_s: float) -> Outcome | None:
        """Return the outcome of a new request; None if no more are sent."""
        if self._is_over or (self._until_s is not None and intended_s >= self._until_s):
            return None
        warm_up = self.limits.warm_up
        is_warm_up = self._sent < warm_up.requests or intended_s < warm_up.s
        self._sent += 1
        if not is_warm_up:
            limits = self.limits
            if self._counted == 0 and limits.for_s is not None:
                self._until_s = intended_s + limits.for_s
                self._deadline = self._loop.call_later(self._until_s - self._now_s(), self._time_is_over)
            self._counted += 1
            if self._counted == limits.requests:
                self._enough()
        return Outcome(talk.name, number, is_warm_up, intended_s, asked_tokens=asked_tokens(talk, number))

    def _time_is_over(self) -> None:
        self._enough()
        self._end_if_done()

    # ---- what came of it

    def _answered(self, asked: InFlight, talk: Conversation, number: int, answers: tuple[str, ...]) -> None:
        outcome = asked.outcome
        self.outcomes.append(outcome)
        if not outcome.is_warm_up:
            self.done += 1
            self.errors += outcome.error is not None
            if outcome.ttft_s is not None:
                insort(self.ttfts_s, outcome.ttft_s)
        following = number + 1
        if following < len(talk.turns) and not self._is_over:
            at_s = outcome.end_s + talk.turns[following].think_s
            answers = (*answers, "".join(asked.said))
            self._at(at_s, lambda: self._turn(talk, following, answers, at_s))
        elif self.limits.clients is None or self._is_over:
            self._close()
        elif outcome.error:
            self._at(self._now_s() + REST_AFTER_ERROR_S, self._free)
        else:
            self._free()

    def _close(self) -> None:
        self._open -= 1
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._open <= 0 and not self._ended.done():
            self._ended.set_result(None)

    # ---- time

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _at(self, at_s: float, call: Callable[[], object]) -> None:
        def now() -> None:
            self._timers.discard(timer)
            call()

        timer: asyncio.TimerHandle = self._loop.call_later(max(0.0, at_s - self._now_s()), now)
        self._timers.add(timer)
