"""The router: what it knows of its replicas, and what it does for every request. No sockets of clients here."""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from api.errors import ApiError, internal, queue_full, too_long
from router.access_log import Line, line_of
from router.accounting import remembered, settle, told
from router.admission import Admission, Admitted
from router.approximate import Approximate
from router.attempt import Attempt, Owner
from router.config import RouterConfig
from router.feeds import Feeds
from router.http.exchange import Exchange
from router.index import Matches, PrefixIndex
from router.members import APPROXIMATE, Member, Members, ServedModel
from router.policy import Decision, Question, choose
from router.prompt import Prompt
from router.record import Remembered
from router.tally import DECISION_S, Histogram
from router.tokens import Draft
from router.upstream import Broken
from router.waiting import Waiting

if TYPE_CHECKING:
    from router.routing import Routing
    from router.tracing import Tracing

log = logging.getLogger(__name__)

THREADS = 2
APPROXIMATE_BLOCKS = 16 * 1024  # for each replica: about a million tokens
RESYNC_PAUSE_S = 60.0  # if a resync does not help, many would not either
WAITING_BODIES = 4  # of the largest size; as many bytes may wait for the threads


class Counts:
    """What happened to requests, whichever replica it was."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # by the error's code
        self.approximate: Counter[str] = Counter()  # by reason
        self.retries = 0
        self.resumes = 0
        self.client_left = 0
        self.decision_s = Histogram(DECISION_S)


class Router:
    def __init__(
        self, config: RouterConfig, members: Members, feeds: Feeds, index: PrefixIndex, admission: Admission
    ) -> None:
        self.config = config
        self.members = members
        self.feeds = feeds
        self.index = index
        self.admission = admission
        self.guesses = PrefixIndex()  # of replicas without events; its slots are the index's
        self.approximate = Approximate(self.guesses, APPROXIMATE_BLOCKS)
        self.waiting: Waiting[Routing] = Waiting(config.queue_size)
        self.started = int(time())
        self.counts = Counts()
        self.decisions: deque[Remembered] = deque(maxlen=config.decisions)
        self.on_answer: Callable[[Line], None] | None = None  # the access log
        self.tracing: Tracing | None = None
        self.draining = False
        self.open_requests = 0
        self._loop = asyncio.get_running_loop()
        self.now_s = self._loop.time
        self.rng = random.Random()
        self._turn = 0
        self._attempts: set[Attempt] = set()
        self._ids = 0
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._waiting_bytes = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- a prompt

    def make_prompt(self, routing: "Routing", model: ServedModel, body: bytes, salt: str | None) -> None:
        """Here or, where it takes long, on a thread; then `routing.prompted`."""
        tokens = model.tokens
        draft = partial(
            tokens.draft, routing.chat, body, routing.peek, model.lora, salt, max_model_len=model.max_model_len
        )
        drafted = draft() if tokens.is_quick(body) else None
        if drafted is not None and drafted.is_quick:
            routing.prompted(drafted.finish())
            return
        make = drafted.finish if drafted is not None else partial(_finished, draft)
        size = len(body)
        if self._waiting_bytes + size > WAITING_BODIES * self.config.max_body_bytes:
            raise queue_full(f"{self._waiting_bytes} bytes of other requests wait to be tokenized; try again", 1)
        self._waiting_bytes += size
        made = self._loop.run_in_executor(self._threads, make)
        made.add_done_callback(partial(self._made, routing, size))

    def _made(self, routing: "Routing", size: int, made: "asyncio.Future[Prompt]") -> None:
        self._waiting_bytes -= size
        if made.cancelled() or routing.is_over:
            return
        error = made.exception()
        if error is None:
            routing.prompted(made.result())
        elif isinstance(error, ApiError):
            routing.refuse(error)
        else:
            log.error("A prompt could not be made", exc_info=error)
            routing.refuse(internal())

    # ---- the choice

    def decide(self, routing: "Routing", model: ServedModel, tried: frozenset[str]) -> Member | None:
        """The replica, with the reasons in `routing.decision`; None: it waits for room. ApiError: that is no use."""
        started = perf_counter()
        question, matches = self.question(model, routing.prompt, routing.session, tried)
        decision = routing.decision = self.choose(model, question)
        self.counts.decision_s.observe(perf_counter() - started)
        if decision.chosen is None:
            self._wait(routing, decision)
            return None
        member = self.members.by_name[decision.chosen.name]
        routing.predict(member, matches)
        return member

    def question(
        self, model: ServedModel, prompt: Prompt, session: str | None, tried: frozenset[str] = frozenset()
    ) -> tuple[Question, dict[int, Matches]]:
        matched: dict[int, float] = {}
        lower: dict[int, float] = matched  # another one as soon as it says something else
        by_size: dict[int, Matches] = {}
        for size, slots in (model.slots if prompt.exact else model.all_slots).items():
            index = self.guesses if size == APPROXIMATE else self.index
            matches = by_size[size] = index.match(prompt.keys(size), slots)
            if matches.lower:
                tokens = size or prompt.approximate_block_tokens
                if matches.lower is not matches.gpu and lower is matched:
                    lower = dict(matched)
                for slot, blocks in matches.gpu.items():
                    matched[slot] = blocks * tokens
                if lower is not matched:
                    for slot, blocks in matches.lower.items():
                        lower[slot] = blocks * tokens
        self._turn += 1
        question = Question(
            tokens=prompt.tokens,
            matched=matched,
            lower=lower,
            session=session,
            tried=tried,
            exact=prompt.exact,
            turn=self._turn,
        )
        return question, by_size

    def choose(self, model: ServedModel, question: Question) -> Decision:
        decision = choose(self.config.policy, question, model.candidates, self.rng, model.ring)
        if decision.nobody == "unavailable":  # better one that is believed to be down than none
            question.anyway = True
            decision = choose(self.config.policy, question, model.candidates, self.rng, model.ring)
        return decision

    def _wait(self, routing: "Routing", decision: Decision) -> None:
        match decision.nobody:
            case "full":
                since_s = routing.queued_s = routing.queued_s or self.now_s()  # who has waited keeps its place
                refused = self.waiting.offer(routing, 0.0, since_s, since_s + self.config.queue_timeout_s)
                if refused is not None:
                    refused.refuse(self.busy())
            case "too_long":
                raise too_long(decision.refusal(), "messages" if routing.chat else "prompt")
            case _:
                raise no_replica(decision.refusal())

    # ---- attempts

    def attempt(self, owner: Owner, member: Member, uncached_tokens: int = 1, *, streams: bool = False) -> Attempt:
        """It is about to be sent: count it."""
        now_s = self.now_s()
        self._ids += 1
        attempt = Attempt(owner, member, self._ids, now_s, streams)
        member.load.sent(attempt.id, uncached_tokens, now_s, streamed=streams)
        self._attempts.add(attempt)
        return attempt

    def generation(self, routing: "Routing", member: Member) -> Attempt:
        """And take for granted what it will have cached."""
        prompt = routing.prompt
        assert routing.decision is not None
        matched = routing.decision.question.matched.get(member.slot, 0)
        streams = member.native or bool(routing.peek.stream)
        attempt = self.attempt(routing, member, max(1, prompt.tokens - int(matched)), streams=streams)
        if prompt.exact and member.block_size != APPROXIMATE:
            deadline_s = attempt.sent_s + self.config.optimistic_ttl_s
            self.index.optimistic.add(member.slot, prompt.keys(member.block_size), deadline_s)
        else:
            self.approximate.routed(member.slot, prompt.keys(APPROXIMATE))
        return attempt

    def answered(self, attempt: Attempt) -> None:
        """A good head has come."""
        now_s = self.now_s()
        attempt.member.health.success(now_s)
        if attempt.streams:
            attempt.member.load.begun(attempt.id, now_s)

    def attempt_over(self, attempt: Attempt, fault: str | None = None, *, refused: bool = False) -> None:
        """However it ended; `fault` is what the replica did wrong."""
        if attempt not in self._attempts:
            return
        self._attempts.discard(attempt)
        now_s = self.now_s()
        attempt.ended_s, attempt.fault = now_s, fault
        member = attempt.member
        member.load.ended(attempt.id, now_s)
        if fault is not None:
            log.warning("%s: %s", member.name, fault)
            member.faults += 1
            member.health.fault(fault, now_s, refused=refused)
        if self.waiting:
            self.room()

    def rests(self, attempt: Attempt) -> None:
        """The replica said itself that it drains."""
        attempt.member.health.rests("it drains")

    def others(self, model: ServedModel | None, tried: frozenset[str]) -> bool:
        """Whether somebody else is there to ask."""
        candidates = model.candidates if model is not None else [member.candidate for member in self.members]
        return any(one.unavailable is None and one.name not in tried for one in candidates)

    def room(self) -> None:
        """Replicas may have room for some that wait: in their order, but past those it is no use for."""
        now_s = self.now_s()
        full: set[str] = set()  # models
        for routing in self.waiting.in_order():
            name = routing.peek.model
            if name in full:
                continue
            if self._has_room(name, routing.tried):
                self.waiting.take(now_s, routing)
                routing.waited_s = now_s - routing.queued_s
                routing.place()
            elif not routing.tried:
                full.add(name)
                if len(full) == len(self.members.models):
                    return

    def _has_room(self, name: str, tried: frozenset[str]) -> bool:
        model = self.members.models.get(name)
        return model is None or any(
            one.unavailable is None and one.name not in tried and not 0 < one.limit <= one.in_flight
            for one in model.candidates
        )

    # ---- the end

    def turned_away(self, scope: Scope, error: ApiError) -> None:
        """Whoever asked was not admitted."""
        self.counts.refused[error.code or str(error.status)] += 1
        if self.on_answer is not None:
            sent = len(error.body())
            self.on_answer(line_of(scope, status=error.status, duration_s=0.0, sent_bytes=sent, request_id=""))

    def released(self, exchange: Exchange, admitted: Admitted, begun_s: float, **more: Any) -> None:
        """A request of the front has ended, whichever way."""
        self.open_requests -= 1
        self.admission.release(admitted)
        if self.on_answer is not None:
            self.on_answer(
                line_of(
                    exchange.scope,
                    status=exchange.status,
                    duration_s=self.now_s() - begun_s,
                    sent_bytes=exchange.sent_bytes,
                    request_id=admitted.request_id,
                    key=admitted.key.name if admitted.key else None,
                    client_left=exchange.disconnected,
                    **more,
                )
            )

    def over(self, routing: "Routing") -> None:
        now_s = self.now_s()
        if self.waiting.cancel(routing):
            routing.waited_s = now_s - routing.queued_s
        more = told(routing) if self.on_answer is not None else {}
        self.released(routing.exchange, routing.admitted, routing.arrived_s, **more)
        if routing.trace is not None:
            routing.trace.end(routing, now_s)
        if routing.exchange.disconnected:
            self.counts.client_left += 1
        self.counts.retries += routing.retries
        self.counts.resumes += routing.resumes
        if routing.decision is not None:
            self.decisions.append(remembered(routing, routing.decision, now_s))
        if not settle(routing, now_s) and routing.chosen is not None and routing.chosen.accuracy.differs_too_often:
            self._resync(routing.chosen)

    def _resync(self, member: Member) -> None:
        now_s = self.now_s()
        if now_s < member.resync_after_s:
            return
        member.resync_after_s = now_s + RESYNC_PAUSE_S
        log.warning("%s: its cache is read anew: predictions of what it has cached fail too often", member.name)
        member.resyncs += 1
        member.accuracy.forget()
        self.feeds.resync(member.name)

    def sweep(self, now_s: float) -> None:
        """A few times a second: what takes too long."""
        for attempt in list(self._attempts):
            if attempt.spoken or attempt.is_paused:  # a client that takes no more is no fault of the replica's
                attempt.spoken, attempt.touched_s = False, now_s
                continue
            silent_s = now_s - attempt.touched_s
            limit_s = self.config.idle_timeout_s if attempt.status else self.config.first_token_timeout_s
            if silent_s > limit_s and attempt.streams:
                what = "no more of its answer came" if attempt.status else "its first token did not come"
                attempt.cancel()
                attempt.broke(Broken(f"{what} within {limit_s:g} s"))
        for routing in self.waiting.expire(now_s):
            routing.waited_s = now_s - routing.queued_s
            routing.refuse(self.busy())
        self.index.optimistic.expire(now_s)

    def busy(self) -> ApiError:
        wait_s = self.waiting.estimated_wait_s(self.now_s())
        return queue_full("every replica is at its limit, and the queue is full or moves too slowly; try again", wait_s)


def _finished(draft: Callable[[], Draft]) -> Prompt:
    return draft().finish()


def no_replica(why: str) -> ApiError:
    headers = {"Retry-After": "1"}
    return ApiError(503, f"{why}; try again", "service_unavailable", code="no_replica", headers=headers)
