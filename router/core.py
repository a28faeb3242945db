"""The router: what it knows of its replicas, and what it does for every request. No sockets of clients here."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.types import Scope

from api.errors import ApiError, queue_full, too_long
from api.http.bodies import Bodies
from router.access_log import Line, line_of
from router.accounting import remembered, routed, settle, told
from router.admission import Admission, Admitted
from router.attempt import Attempt, Owner
from router.budget import Budget
from router.config import RouterConfig
from router.exchange import Exchange
from router.feeds import Feeds
from router.members import Member, Members, ServedModel, no_replica
from router.placement.cost import Candidate, Question
from router.placement.decision import Decision
from router.placement.eligibility import NONE_TRIED, obstacles
from router.placement.index import Matches
from router.placement.placement import Placement
from router.placement.placement import Prompt as PlacedPrompt
from router.placement.waiting import Waiting
from router.prefixes.recent import Recent
from router.prompt import Peek, Prompt
from router.reading.client import Reading
from router.reading.messages import Found, Make
from router.reading.prompts import make_for, prompt_from
from router.record import Remembered
from router.request import Request
from router.request_log import RequestLog
from router.retries import RetryBudget
from router.tally import DECISION_S, Histogram
from router.tokens import Draft
from router.upstream import Broken

if TYPE_CHECKING:
    from router.tracing import Tracing

log = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], Coroutine[None, None, None]]

THREADS = 2
PAUSE_S, MOST_PAUSE_S = 0.1, 2.0  # before a request is tried again that nobody took; it doubles each time
QUIET_S = 0.3  # without a byte: such a request may be taken away from a replica that is silent
RESYNC_PAUSE_S = 60.0  # if a resync does not help, many would not either
INDEX_WITHIN_S = 30.0  # from the start: then it serves with what it knows
HELD_BYTES = 256 * 1024 * 1024  # of answers that are not passed on as they come: whole ones, and long frames
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
        self, config: RouterConfig, members: Members, feeds: Feeds, placement: Placement, admission: Admission
    ) -> None:
        self.config = config
        self.members = members
        self.feeds = feeds
        self.placement = placement
        self.admission = admission
        self.retry_budget = RetryBudget()
        self.waiting: Waiting[Request] = Waiting(config.queue_size)
        self.started = int(time())
        self.bodies = Bodies(config.max_bodies_bytes)
        self.reading = Reading(config.queue_timeout_s)
        self.counts = Counts()
        self.decisions: deque[Remembered] = deque(maxlen=config.decisions)
        self.recent = Recent(config.recent_prompts)
        self.shows_prompts = not config.demand_key if config.show_prompts is None else config.show_prompts
        self.on_answer: Callable[[Line], None] | None = None  # the access log
        self.request_log: RequestLog | None = None
        self.order = count()  # of what changes the figures that replicas are chosen by
        self.tracing: Tracing | None = None
        self.leaving = False  # soon it takes no requests: each answer is the last of its connection
        self.draining = False
        self.open_requests = 0
        self.held = Budget(HELD_BYTES)
        self._loop = asyncio.get_running_loop()
        self.now_s = self._loop.time
        self.index_awaited_until_s = self.now_s() + INDEX_WITHIN_S  # by who asks whether it is ready
        self._attempts: set[Attempt] = set()
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._waiting_bytes = 0
        self._is_untold = False  # whether the access log has failed

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- a prompt

    def make_prompt(self, routing: Request, model: ServedModel, body: bytes, salt: str | None) -> None:
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

    def read_apart(self, routing: Request, body: bytes) -> None:
        """Have a large body read in another process; then `routing.made`."""
        self.aside(routing.exchange, routing.refuse, partial(self._read_apart, routing, body))

    async def _read_apart(self, routing: Request, body: bytes) -> None:
        salt: str | None = None

        def want(found: Found) -> Make:
            nonlocal salt
            peek = Peek(**found.fields)
            salt = routing.admitted.cache_salt(peek.cache_salt)
            return make_for(routing.found(peek), routing.chat, salt)

        made = await self.reading.read(body, want)
        routing.exchange.aside = None
        assert made is not None and routing.model is not None, "it was wanted"
        routing.made(made.body, prompt_from(made, routing.model, routing.peek, salt))

    def aside(self, exchange: Exchange, refuse: Callable[[ApiError], None], work: Work) -> None:
        """Do what takes a while for this request, unless it ends before."""

        async def watched() -> None:
            try:
                await work()
            except ApiError as error:
                exchange.aside = None
                refuse(error)
            except Exception:
                exchange.aside = None
                log.exception("A body could not be read")
                exchange.fail()

        exchange.aside = self._loop.create_task(watched())

    def _made(self, routing: Request, size: int, made: "asyncio.Future[Prompt]") -> None:
        self._waiting_bytes -= size
        if made.cancelled() or routing.is_over:
            return
        try:
            routing.prompted(made.result())
        except ApiError as error:
            routing.refuse(error)
        except Exception:
            log.exception("A prompt could not be made")
            routing.exchange.fail()
        finally:
            del made  # it has the error, and that this frame: a cycle, which would keep the body until it is collected

    # ---- the choice

    def decide(self, routing: Request, model: ServedModel, tried: frozenset[str]) -> Member | None:
        """The replica, with the reasons in `routing.decision`; None: it waits for room. ApiError: that is no use."""
        started = perf_counter()
        question, matches = self.question(model, routing.prompt, routing.session, tried, routing.came_s)
        decision = routing.decision = self.choose(model, question)
        self.counts.decision_s.observe(perf_counter() - started)
        if routing.noted is not None:
            routing.noted.decided(next(self.order), decision, model.members, self.feeds)
        if decision.chosen is None:
            self._wait(routing, decision)
            return None
        member = self.members.by_name[decision.chosen.name]
        routing.predict(member, matches)
        return member

    def question(
        self,
        model: ServedModel,
        prompt: Prompt,
        session: str | None,
        tried: frozenset[str] = NONE_TRIED,
        came_s: float | None = None,
    ) -> tuple[Question, dict[int, Matches]]:
        slots = model.slots if prompt.exact else model.all_slots
        return self.placement.question(prompt, slots, self.now_s(), session=session, tried=tried, came_s=came_s)

    def trust(self, member: Member, trust: float) -> None:
        """Count the member's claims by this factor from now on."""
        if trust != member.trust:
            member.trust = trust
            self.placement.trust(member.slot, trust)

    def choose(self, model: ServedModel, question: Question) -> Decision:
        return self.placement.decide(
            question, model.candidates, model.ring if self.config.policy == "session" else None
        )

    def _wait(self, routing: Request, decision: Decision) -> None:
        """Replicas that are full will have room, and those that are silent or gone may come back."""
        if decision.nobody == "too_long":
            raise too_long(decision.refusal(), "messages" if routing.chat else "prompt")
        if decision.nobody == "tried" and all(one.name in routing.unfit for one in decision.candidates):
            raise no_replica(decision.refusal())
        now_s = self.now_s()
        routing.queued_s = routing.queued_s or now_s
        begun, name = routing.exchange.response_started, routing.peek.model
        # What has waited keeps its place, and an answer that has begun goes before new requests.
        routing.since_s = routing.since_s or (routing.came_s if begun else now_s)
        routing.waits_until_s = routing.waits_until_s or now_s + self.config.queue_timeout_s
        if decision.nobody != "full":
            routing.tried = routing.unfit  # whoever is back by then may be asked again
        if decision.question.tried:
            routing.again_s = now_s + min(MOST_PAUSE_S, PAUSE_S * 2**routing.fruitless)
            routing.fruitless = min(routing.fruitless + 1, 16)
        refused: Request | None = routing
        if now_s < routing.waits_until_s and (begun or decision.nobody == "full" or self._may_wait(name)):
            refused = self.waiting.offer(
                routing,
                0.0,
                now_s,
                routing.waits_until_s,
                since_s=routing.since_s,
                group=name,
                tokens=routing.prompt.tokens if routing.prompt.exact else 0,
                tried=routing.tried,
                not_before_s=routing.again_s,
            )
        if refused is not None:
            refused.give_up(self.nobody_took(refused))

    def _may_wait(self, model: str) -> bool:
        """Those who wait for a model that nobody serves now leave half of the queue to others."""
        return 2 * self.waiting.groups[model] <= self.waiting.capacity

    # ---- attempts

    def sent(self, owner: Owner, member: Member, decision: Decision, prompt: PlacedPrompt, streams: bool) -> Attempt:
        """It is about to be sent: count it."""
        ranked = member.native and decision.policy == "cost"
        placed = self.placement.sent(
            decision, member.load, prompt, member.block_size, self.now_s(), streams=streams, ranked=ranked
        )
        attempt = Attempt(owner, member, placed, next(self.order))
        self._attempts.add(attempt)
        return attempt

    def generation(self, routing: Request, member: Member) -> Attempt:
        assert routing.decision is not None
        attempt = self.sent(
            routing, member, routing.decision, routing.prompt, member.native or bool(routing.peek.stream)
        )
        if routing.noted is not None:
            routing.noted.attempts.append(attempt)
        if routing.queued_s:
            routing.waited_s, routing.queued_s = routing.waited_s + attempt.placed.sent_s - routing.queued_s, 0.0
        return attempt

    def answered(self, attempt: Attempt) -> None:
        """A good head has come."""
        now_s = self.now_s()
        attempt.member.health.success(now_s)
        attempt.begun_s, attempt.begun_order = now_s, next(self.order)
        self.placement.begun(attempt.placed, now_s)

    def attempt_over(
        self, attempt: Attempt, fault: str | None = None, *, refused: bool = False, silent: bool = False
    ) -> None:
        """However it ended; `fault` is what the replica did wrong. Silence alone is the upkeep's to judge."""
        if attempt not in self._attempts:
            return
        self._attempts.discard(attempt)
        now_s = self.now_s()
        attempt.ended_s, attempt.ended_order, attempt.fault = now_s, next(self.order), fault
        member = attempt.member
        self.placement.ended(attempt.placed, now_s)
        if fault is not None:
            log.log(logging.DEBUG if silent else logging.WARNING, "%s: %s", member.name, fault)  # that is said once
            member.faults += 1
            if refused or not silent:
                member.health.fault(fault, now_s, refused=refused, silent=silent)
        if self.waiting and attempt.begun_s:  # after a failure, the clock looks: or two that fail would call each other
            self.room()

    def rests(self, attempt: Attempt) -> None:
        """The replica said itself that it drains."""
        attempt.member.health.rests("it drains")

    def refused_at_once(self, attempt: Attempt) -> None:
        """It looks idle, and yet it is not who should get the next request."""
        attempt.member.health.refusal(self.now_s())

    def move_unheard(self, to: Mapping[Member, Sequence[Member]]) -> None:
        """What some replicas are answering, and was not heard of, goes on at others, where that can be.

        Those are suspected, or heard again, but not on every connection: packets of these may be sent anew only in
        a while. The rest waits.
        """
        hopeless: set[tuple[Member, str | None, bool]] = set()
        for attempt in list(self._attempts):
            member, owner = attempt.member, attempt.owner
            others = to.get(member)
            kind = member, owner.model_name, owner.exchange.response_started
            if not others or kind in hopeless or not self._is_unheard(attempt):
                continue
            if not owner.may_move(attempt, others):
                hopeless.add(kind)
                continue
            why = member.suspicion or "nothing has come by its old connection since it is heard again"
            attempt.cancel()
            attempt.broke(Broken(why, silent=True))

    def is_stuck(self, member: Member) -> bool:
        """Whether something it answers has not been heard of since the replica itself is heard again."""
        return any(attempt.member is member and self._is_unheard(attempt) for attempt in self._attempts)

    def _is_unheard(self, attempt: Attempt) -> bool:
        member = attempt.member
        if attempt.spoken or attempt.is_paused:
            return False
        if not member.suspicion:
            sent_into_silence = attempt.placed.sent_s > member.silent_since_s
            return attempt.touched_s < member.recovered_s and (attempt.goes_on or sent_into_silence)
        if attempt.goes_on:
            return attempt.touched_s < member.silent_since_s + QUIET_S
        return attempt.touched_s < self.now_s() - QUIET_S

    def others(self, model: ServedModel | None, tried: frozenset[str], tokens: int = 0) -> bool:
        """Whether somebody else is there to ask, now or when there is room."""
        candidates = model.candidates if model is not None else [member.candidate for member in self.members]
        return not {None, "full"}.isdisjoint(obstacles(candidates, tokens, tried))

    def room(self) -> None:
        """Replicas may have room for some that wait."""
        for routing in self.waiting.with_room(self.now_s(), self._candidates_of):
            routing.exchange.guard(routing.place)  # those after it have their turn whatever happens to it

    def _candidates_of(self, name: str) -> Sequence[Candidate]:
        model = self.members.models.get(name)  # None: its replicas may come back while there is time to wait
        return () if model is None else model.candidates

    # ---- the end

    def turned_away(self, scope: Scope, error: ApiError) -> None:
        """Whoever asked was not admitted."""
        self.counts.refused[error.code or str(error.status)] += 1
        if self.on_answer is not None:
            sent = len(error.body())
            self._tell(line_of(scope, status=error.status, duration_s=0.0, sent_bytes=sent, request_id=""))

    def released(self, exchange: Exchange, admitted: Admitted, begun_s: float, **more: Any) -> None:
        """A request of the front has ended, whichever way."""
        self.open_requests -= 1
        self.admission.release(admitted)
        if self.on_answer is not None:
            self._tell(
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

    def _tell(self, line: Line) -> None:
        assert self.on_answer is not None, "its caller has looked"
        try:
            self.on_answer(line)
        except OSError as error:  # a full disk is no reason to answer nobody
            if not self._is_untold:
                log.error("The access log cannot be written (%s): lines are missing from now on", error)
            self._is_untold = True

    def over(self, routing: Request) -> None:
        now_s = self.now_s()
        self.waiting.cancel(routing)
        if routing.queued_s:
            routing.waited_s += now_s - routing.queued_s
        more = told(routing) if self.on_answer is not None else {}
        self.released(routing.exchange, routing.admitted, routing.arrived_s, **more)
        if self.request_log is not None:
            self.request_log.over(routing, now_s)
        if routing.trace is not None:
            routing.trace.end(routing, now_s)
        if routing.exchange.disconnected:
            self.counts.client_left += 1
        self.counts.retries += routing.retries
        self.counts.resumes += routing.resumes
        if routing.decision is not None:
            self.decisions.append(remembered(routing, routing.decision, now_s))
            if routing.first_byte_s and self.config.recent_prompts:
                self.recent.add(routed(routing, with_text=self.shows_prompts))
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

    def sweep(self, now_s: float, gap_s: float = 0.0) -> None:
        """A few times a second: what takes too long. `gap_s`: so long the router itself stood still."""
        for attempt in list(self._attempts):
            attempt.touched_s = min(now_s, attempt.touched_s + gap_s)
            try:
                self._look_at(attempt, now_s)
            except Exception:
                attempt.crash()
        for routing in self.waiting.expire(now_s):
            routing.exchange.guard(routing.give_up, self.nobody_took(routing))
        self.placement.expire(now_s)

    def _look_at(self, attempt: Attempt, now_s: float) -> None:
        unread = attempt.owner.exchange.unread_bytes if attempt.is_paused else None
        if attempt.spoken or unread != attempt.unread:  # something has come, or the client has taken something
            attempt.spoken, attempt.unread, attempt.touched_s = False, unread, now_s
            return
        goes_on = attempt.goes_on
        limit_s = self.config.idle_timeout_s if goes_on or unread is not None else self.config.first_token_timeout_s
        if now_s - attempt.touched_s <= limit_s:
            return
        if unread is not None:  # no fault of the replica's, which has others to answer
            attempt.owner.exchange.abandon()
            return
        first = "its first token" if attempt.placed.streams else "its answer"
        what = "no more of its answer came" if goes_on else f"{first} did not come"
        attempt.cancel()
        attempt.broke(Broken(f"{what} within {limit_s:g} s", late=True))

    def nobody_took(self, routing: Request) -> ApiError:
        """Why it waited in vain."""
        decision = routing.decision
        if decision is None or decision.nobody == "full":
            return self.busy()
        return no_replica(decision.refusal())

    def busy(self) -> ApiError:
        wait_s = self.waiting.estimated_wait_s(self.now_s())
        return queue_full("every replica is at its limit, and the queue is full or moves too slowly; try again", wait_s)


def _finished(draft: Callable[[], Draft]) -> Prompt:
    return draft().finish()
