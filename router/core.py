"""The router: its knowledge of replicas, and its part in every request. No client sockets here."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from api.errors import queue_full
from api.http.bodies import Bodies
from router.config import RouterConfig
from router.lifecycle import Lifecycle
from router.members.broken import Broken
from router.members.feed import Feeds
from router.members.members import Member, Members, Server
from router.members.predictions import Predictions
from router.placement.cost import Candidate, Prompt
from router.placement.decision import Decision
from router.placement.placement import Placement
from router.placement.waiting import Waiting
from router.prompts.model_rewrites import NO_RULES
from router.prompts.reading.client import Reading
from router.proxy.attempt import BODY, Attempt, AttemptListener
from router.proxy.request_summary import RequestSummary, count_usage
from router.proxy.responses import KeptResponses
from router.proxy.retries import Budget, RetryBudget, Row
from router.proxy.services import Waiter
from router.records.history import History
from router.tenants.admission import Admission
from router.tenants.ledger import KeyTotals, Ledger
from router.tenants.usage import UsageFile

if TYPE_CHECKING:
    from router.members.asking import Asking
    from router.members.verification import Verification
    from router.records.tracing import Tracing

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 2
QUIET_S = 0.3  # after this long without a byte a request may leave a silent replica
RESYNC_PAUSE_S = 60.0  # many resyncs would not help where one does not
HELD_BYTES = 256 * 1024 * 1024  # the limit for buffered answers: unstreamed ones, and long frames
WAITING_BODIES = 4  # bodies of the largest size that may wait for the threads


class Router:
    def __init__(
        self, config: RouterConfig, members: Members, feeds: Feeds, placement: Placement, admission: Admission
    ) -> None:
        self.config = config
        self.members = members
        self.feeds = feeds
        self.predictions = Predictions(self._predicted_wrongly)
        self.placement = placement
        self.admission = admission
        self.model_rewrites = NO_RULES
        self.rewriting = asyncio.Lock()  # one large body at a time
        self.retry_budget = RetryBudget()
        self.waiting: Waiting[Waiter] = Waiting(config.queue_size)
        self.newcomers: Waiting[Waiter] = Waiting(config.queue_size)  # requests of sessions that may not begin yet
        self.bodies = Bodies(config.max_bodies_bytes)
        self.reading = Reading(config.queue_timeout_s)
        self.history = History(config, self.predictions, placement.index)
        self.tracing: Tracing | None = None
        self.responses = KeptResponses(members)
        self.verification: Verification | None = None  # checks prompts for engines that build them themselves
        self.asking: Asking | None = None  # asks engines for prompts that cannot be made here
        file = None if config.usage_db is None else UsageFile(config.usage_db)
        totals = KeyTotals(config.metrics_keys)
        self.ledger = Ledger(file, config.usage_days, admission.shared, lambda: admission.accounts, totals)
        self.held = Budget(HELD_BYTES)
        self.loop = asyncio.get_running_loop()
        self.now_s = self.loop.time
        self.lifecycle = Lifecycle(members, self.now_s, config.model_rewrites_file is not None)
        self.attempts: dict[Attempt, None] = {}  # their order is that of sending
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._waiting_bytes = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def in_thread(self, make: Callable[[], T], size: int, done: "Callable[[asyncio.Future[T]], None]") -> None:
        """Make a prompt of this many bytes on a thread; raise ApiError if too much is waiting for that already."""
        if self._waiting_bytes + size > WAITING_BODIES * self.config.max_body_bytes:
            raise queue_full(f"{self._waiting_bytes} bytes of other requests wait to be tokenized; try again", 1)

        def is_made(made: "asyncio.Future[T]") -> None:
            self._waiting_bytes -= size
            done(made)

        self._waiting_bytes += size
        self.loop.run_in_executor(self._threads, make).add_done_callback(is_made)

    # ---- the choice

    def doubt(self, member: Member) -> str | None:
        """Why the index may differ from the member's cache now; None: it is exact."""
        if member.feed is None:
            return member.why_no_events or "its events are not followed"
        if member.overclaims:
            return "its events claim more blocks than it can hold"
        return member.feed.inexact

    def candidates_of(self, name: str) -> Sequence[Candidate]:
        """The replicas that serve a model now; all replicas if the name is empty."""
        if not name:
            return self.members.everybody
        model = self.members.models.get(name)  # None: its replicas may come back while there is time to wait
        return () if model is None else model.candidates

    # ---- attempts

    def sent(
        self,
        owner: AttemptListener,
        member: Member,
        decision: Decision,
        prompt: Prompt,
        streams: bool,
        *,
        envelope: bool = False,
    ) -> Attempt:
        """Count a request that is about to be sent, and return its attempt.

        `envelope`: a replica of ours gets its rank beside the body.
        """
        ranked = envelope and decision.policy == "cost"
        placed = self.placement.sent(
            decision, member.load, prompt, member.block_size, self.now_s(), streams=streams, ranked=ranked
        )
        attempt = Attempt(owner, member, placed, placed.sent_s)
        self.attempts[attempt] = None
        return attempt

    def answered(self, attempt: Attempt) -> None:
        """Record that the replica has begun a successful response.

        Ours begin with the first token. Other engines send the head of a stream before they have computed its prompt.
        """
        attempt.member.health.success(self.now_s())
        if attempt.takes_frames or not attempt.placed.streams:
            self.computed(attempt)

    def computed(self, attempt: Attempt) -> None:
        """Record that a part of the response has come, and so that its prompt is computed."""
        if attempt.begun_s:
            return
        now_s = self.now_s()
        attempt.begun_s = now_s
        self.placement.begun(attempt.placed, now_s)

    def learn(self, attempt: Attempt, row: Row, reason: str) -> None:
        """Tell the replica's health of a failure, as the table says."""
        if attempt not in self.attempts or row.lesson == "nothing":
            return
        member, now_s = attempt.member, self.now_s()
        if row.lesson == "rests":
            member.health.rests("it drains")
            return
        if row.lesson in ("busy", "fault, busy"):
            member.health.refusal(now_s)
        if row.lesson != "busy":
            is_unheard = row.lesson in ("unheard", "suspect")
            log.log(
                logging.DEBUG if is_unheard else logging.WARNING, "%s: %s", member.name, reason
            )  # upkeep warns of it
            attempt.fault = reason
            member.server.faults += 1
            if row.lesson != "suspect":
                opens = row.lesson in ("opens", "unheard")
                member.health.fault(reason, now_s, refused=opens, silent=is_unheard)

    def attempt_over(self, attempt: Attempt) -> None:
        """Record the end of an attempt, from which the replica's health has learned what there is."""
        if attempt not in self.attempts:
            return
        del self.attempts[attempt]
        now_s = self.now_s()
        attempt.ended_s = now_s
        attempt.count(now_s)
        self.placement.ended(attempt.placed, now_s)
        if attempt.spoken == BODY and attempt.fault is None:
            attempt.member.server.works(now_s)
        if attempt.begun_s and self.waiting.groups:  # else two failing ones could call each other forever
            self.room()

    def move_unheard(self, to: Mapping[Server, Sequence[Member]]) -> None:
        """Move unanswered requests of the servers in `to` to the replicas listed for each, where possible.

        The replicas are suspected, or heard again but not on every connection: on the others, TCP may take a while to
        retransmit. Requests that cannot move wait.
        """
        hopeless: set[tuple[Member, str | None, bool]] = set()
        for attempt in list(self.attempts):
            member, owner = attempt.member, attempt.owner
            others = to.get(member.server)
            kind = member, owner.model_name, owner.exchange.response_started
            if not others or kind in hopeless or not self._is_unheard(attempt):
                continue
            if not owner.may_move(attempt, others):
                hopeless.add(kind)
                continue
            why = member.server.suspicion or "its old connection stayed silent after it was heard again"
            attempt.cancel()
            attempt.broke(Broken(why, silent=True))

    def is_stuck(self, server: Server) -> bool:
        """Return whether a request at the server is silent, although the server itself may be heard again."""
        return any(attempt.member.server is server and self._is_unheard(attempt) for attempt in self.attempts)

    def _is_unheard(self, attempt: Attempt) -> bool:
        server = attempt.member.server
        if attempt.spoken or attempt.is_paused:
            return False
        if not server.suspicion:
            sent_into_silence = attempt.placed.sent_s > server.silent_since_s
            return attempt.touched_s < server.recovered_s and (attempt.goes_on or sent_into_silence)
        if attempt.goes_on and attempt.begun_s:  # else its head has come, for which no engine is needed
            return attempt.touched_s < server.silent_since_s + QUIET_S
        return attempt.touched_s < self.now_s() - QUIET_S

    def room(self) -> None:
        """Place waiting requests at replicas that have room."""
        for request in self.waiting.with_room(self.now_s(), self.candidates_of) if self.waiting else ():
            request.exchange.guard(request.flow.place)  # an error in one must not stop the next

    # ---- the end

    def over(self, summary: RequestSummary) -> None:
        """Give back what a finished request held, and charge its key."""
        self.lifecycle.open_requests -= 1
        if attempts := summary.attempts:
            last, used = attempts[-1].placed, summary.used
            if last.tenant is not None or last.turn is not None:
                placed = [attempt.placed for attempt in attempts]
                self.placement.used(placed, used.computed, used.generated, summary.ended_s)
        if summary.admitted.charge is not None:
            self.admission.release(summary.admitted, summary.used, summary.ended_s)
        key, model = summary.admitted.key, summary.model
        counts = self.ledger.counts("" if key is None else key.name, "" if model is None else model.name)
        count_usage(counts, summary)
        self.history.over(summary)

    def _predicted_wrongly(self, name: str) -> None:
        """Read a replica's cache again if predictions of its cached tokens fail too often."""
        member, now_s = self.members.by_name.get(name), self.now_s()
        if member is None or not member.accuracy.differs_too_often or now_s < member.resync_after_s:
            return
        member.resync_after_s = now_s + RESYNC_PAUSE_S
        log.warning("%s: reading its cache again, since predictions of its cached tokens fail too often", member.name)
        member.resyncs += 1
        member.accuracy.forget()
        if member.feed is not None:
            member.feed.resync()

    def sweep(self, now_s: float, gap_s: float = 0.0) -> None:
        """Time out attempts and waiting requests; `gap_s` is how long the router itself stood still."""
        for attempt in list(self.attempts):
            attempt.touched_s = min(now_s, attempt.touched_s + gap_s)
            attempt.count(now_s)
            try:
                self._look_at(attempt, now_s)
            except Exception:
                attempt.crash()
        self.predictions.settle(now_s)
        self.feeds.tick()
        for request in (*self.waiting.expire(now_s), *self.newcomers.expire(now_s)):
            request.exchange.guard(request.give_up_waiting)
        for model, working_set in self.placement.working_sets.items():
            for name in working_set.tick(now_s, self.candidates_of(model)):
                for request in self.newcomers.of(f"{model}/{name}"):
                    self.newcomers.take(now_s, request)
                    request.exchange.guard(request.flow.place)
        self.placement.expire(now_s)

    def _look_at(self, attempt: Attempt, now_s: float) -> None:
        if attempt.status and not attempt.owner.exchange.is_watched:
            return  # its end is the gateway's to tell
        unread = attempt.owner.exchange.unread_bytes if attempt.is_paused else None
        if attempt.spoken or unread != attempt.unread:  # the replica has sent or the client has read something
            if attempt.spoken == BODY:
                attempt.member.server.works(now_s)
            attempt.spoken, attempt.unread, attempt.touched_s = 0, unread, now_s
            return
        goes_on = attempt.goes_on
        limit_s = self.config.idle_timeout_s if goes_on or unread is not None else self.config.first_token_timeout_s
        limit_s = min(limit_s, attempt.within_s)
        if now_s - attempt.touched_s <= limit_s:
            return
        if unread is not None:  # the client is stuck, not the replica
            attempt.owner.exchange.abandon()
            return
        first = "its first token" if attempt.placed.streams else "its answer"
        what = "no more of its answer came" if goes_on else f"{first} did not come"
        attempt.cancel()
        attempt.broke(Broken(f"{what} within {limit_s:g} s", late=True))
