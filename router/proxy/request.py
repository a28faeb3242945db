"""One client request for a replica: it is placed, waits for room, is sent, and ends.

All methods are called by the client's exchange, by attempts, or by the router when there is room; none blocks. A
request alone writes its fields; when it is over, the router gets a summary.
"""

import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from api.errors import ApiError, class_refused, queue_full, too_long
from router.members.broken import Broken
from router.members.members import no_replica
from router.placement.classes import ServiceClass
from router.placement.cost import NONE_TRIED, Candidate, Tenant
from router.placement.decision import Decision
from router.placement.eligibility import obstacles
from router.placement.elsewhere import fetches
from router.placement.objectives import Outlook
from router.placement.prompt import Prompt
from router.placement.waiting import STEP_S
from router.proxy.admission import Admitted
from router.proxy.attempt import Attempt, Owner
from router.proxy.exchange import Exchange
from router.proxy.headers import TO_CLIENT, length_of, lines
from router.proxy.kept_answer import KeptAnswer, SentEvents
from router.proxy.log_notes import Notes
from router.proxy.predicted_hit import PredictedHit
from router.proxy.prefill import Prefill
from router.proxy.request_summary import RequestSummary
from router.proxy.retries import LATE, MAX_LOST, MOST_MOVES, NOT_REACHED, SILENT, Next, Row, loss, refusal
from router.proxy.withheld import PLACING, PRIORITY, TRANSFER, withhold
from router.tenants.keys import Key
from router.tenants.limits import Use

if TYPE_CHECKING:
    from router.core import Router
    from router.members.members import Member

log = logging.getLogger(__name__)

MOST_TENANT_BYTES = 100  # of the name that a gateway gives
PAUSE_S, MOST_PAUSE_S = 0.1, 2.0  # before a retry of a request that no replica took; doubled each time
DYING_S = 0.5  # before the last try: replicas of a machine that dies do not all end at the same moment


@dataclass(slots=True, eq=False)
class Request(Owner):
    router: "Router"
    exchange: Exchange
    admitted: Admitted
    arrived_s: float
    came_s: float = field(init=False)  # all of its body
    first_byte_s: float = 0.0
    ended_s: float = 0.0
    prompt: Prompt = field(init=False)
    decision: Decision | None = None
    attempt: Attempt | None = None  # that is under way
    attempts: list[Attempt] = field(default_factory=list)
    hit: PredictedHit = field(default_factory=PredictedHit)
    notes: Notes | None = None  # for the request log
    tried: frozenset[str] = NONE_TRIED  # replicas that have failed it
    unfit: frozenset[str] = NONE_TRIED  # of these, those that cannot go on with it, or took too long
    retries: int = 0
    resumes: int = 0
    is_over: bool = False
    why: str = ""  # it ended without an answer
    prefill: Prefill | None = None  # None: its prompt is computed where its answer is generated
    waited_s: float = 0.0  # for room
    _paused_s: float = 0.0  # for peers
    _queued_s: float = 0.0  # when it began to wait; 0: it does not
    _since_s: float = 0.0  # when it first began to wait
    _waits_until_s: float = 0.0  # 0: it has not waited since a replica answered
    _fruitless: int = 0  # attempts since a replica answered
    _body: bytes = b""
    _client_is_full: bool = False
    _is_new: bool = True  # from its first choice on it is not refused for its class's sake
    _outlook: Outlook | None = None  # None: it has no class
    _priority: int | None = None  # that its client asked for, where the router is to obey it
    _lost: int = 0  # replicas, and errors after which another one was asked
    _moves: int = 0  # away from replicas that fell silent
    _events: SentEvents | None = None  # for a client that reads events, so that its stream can end with an error
    _kept: KeptAnswer | None = None  # of a whole answer, which another replica can repeat

    def __post_init__(self) -> None:
        self.came_s = self.arrived_s
        self.exchange.answerer = self
        self.exchange.on_end = self._over
        if self.admitted.charge is not None:
            self.exchange.more_lines = self._limit_lines

    # ---- overridden by each kind of request

    def serve(self, exchange: Exchange) -> None:
        """Begin with the whole body."""
        raise NotImplementedError

    @property
    def _may_repeat(self) -> bool:
        """Tell whether several replicas may answer it, of which one is heard: it has no other effect."""
        return True

    @property
    def prompt_field(self) -> Literal["messages", "prompt"]:
        return "prompt"

    def _is_ready(self) -> bool:
        """Check the model once more before a replica is chosen; return False if other work comes first."""
        return True

    def _choose(self) -> Decision:
        raise NotImplementedError

    def _send(self, member: "Member", decision: Decision) -> bool:
        """Send to this replica; return False if it cannot continue the client's part of the answer."""
        raise NotImplementedError

    def _computes_elsewhere(self, decision: Decision) -> bool:  # noqa: ARG002
        """Send the prompt to another replica first, if that gains; return False if it does not."""
        return False

    def expected_use(self) -> Use | None:
        """The tokens of the prompt at the replica that was just chosen; None: they are known only afterwards."""
        return None

    def used(self) -> Use:
        """The tokens that it has used so far, as its key is charged."""
        raise NotImplementedError

    def summary(self) -> RequestSummary:
        raise NotImplementedError

    @property
    def tenant(self) -> Tenant | None:
        """Return the party whose share of the replicas it takes; None: there are no shares."""
        key = self.admitted.key
        service = None if key is None else self._service_of(key)
        if (priorities := self.router.priorities) is not None:
            service = priorities.service(key, service, self.exchange.scope["headers"])
        if key is None:  # all requests of a class are one tenant; no key's name begins with a parenthesis
            model = self.model_name or ""
            return None if service is None else Tenant(f"({service.name})", model, service.weight, service)
        name = key.name
        if key.tenant_header is not None:
            value = dict(self.exchange.scope["headers"]).get(key.tenant_header, b"")
            name = f"{name}/{value[:MOST_TENANT_BYTES].decode('latin-1')}"
        return Tenant(name, self.model_name or "", key.weight, service)

    def _service_of(self, key: Key) -> ServiceClass | None:
        """The request's class; None: there are no classes."""
        return key.classes[0] if key.classes else None

    # ---- to a replica

    def place_in_turn(self) -> None:
        """Place the request once the peers that got one at the same moment, and whose turn is earlier, have chosen."""
        self._paused_s = self.router.placement.pause_s(self._candidates())
        if self._paused_s:
            self.router.loop.call_later(self._paused_s, self.exchange.guard, self.place)
        else:
            self.place()

    def place(self) -> None:
        """Choose a replica and send the request there, or wait until one has room."""
        try:
            while not self.is_over and self._is_ready():
                decision = self.decision = self._choose()
                if self._is_new:
                    self._is_new = False
                    self.router.retry_budget.requests += 1
                    self._check_class(decision)
                if decision.chosen is None:
                    self._wait(decision)
                    return
                member = self.router.members.by_name[decision.chosen.name]
                if self.admitted.charge is not None:
                    self._charge_prompt()
                if self._computes_elsewhere(decision) or self._send(member, decision):
                    return
                self.tried, self.unfit = self.tried | {member.name}, self.unfit | {member.name}
        except ApiError as error:
            self.give_up(error)

    def _check_class(self, decision: Decision) -> None:
        """Raise ApiError 503 if its class, or one above, cannot be served in time."""
        tenant = decision.question.tenant
        if tenant is None or (service := tenant.service) is None or decision.rejection not in (None, "full"):
            return
        router, question = self.router, decision.question
        room_s = 0.0 if decision.chosen else router.waiting.wait_of(question.counts_from_s, question.now_s)
        self._outlook = router.placement.outlook(decision, room_s)
        if self._outlook is not None and (wait_s := self._outlook.refused_for_s) is not None:
            router.history.counts.classes.refused(service)
            raise class_refused(service.name, wait_s)

    def _charge_prompt(self) -> None:
        """Charge the key for the prompt; raise ApiError 429 if that is more than its limits leave."""
        charge = self.admitted.charge
        if charge is not None and not charge.is_prompted and (use := self.expected_use()) is not None:
            charge.take_prompt(use, self.router.now_s())

    def _limit_lines(self) -> bytes:
        """The headers about the key's limits, once it is charged for what was used so far."""
        charge = self.admitted.charge
        if charge is None:
            return b""
        return charge.lines(self.router.now_s(), self.used())

    def _wait(self, decision: Decision) -> None:
        """Queue the request: full replicas will have room, and silent or missing ones may come back."""
        if decision.rejection == "too_long":
            raise too_long(decision.refusal(), self.prompt_field)
        if decision.rejection == "tried" and all(
            one.name in self.unfit for one in decision.candidates if one.role != "prefill"
        ):
            raise no_replica(decision.refusal())
        router = self.router
        now_s, begun = router.now_s(), self.exchange.response_started
        self._queued_s = self._queued_s or now_s
        # A request that waits again keeps its place, and a begun answer goes before new requests.
        self._since_s = self._since_s or (self.came_s if begun else now_s)
        self._waits_until_s = self._waits_until_s or now_s + router.config.queue_timeout_s
        again_s = 0.0
        if self.tried:
            again_s = now_s + min(MOST_PAUSE_S, PAUSE_S * 2**self._fruitless)
            self._fruitless = min(self._fruitless + 1, 16)
        if decision.rejection != "full":
            self.tried = self.unfit  # the others may be asked again once they are back
        refused: Owner | None = self
        group = self.model_name or ""
        if now_s < self._waits_until_s and (begun or decision.rejection == "full" or router.may_wait(group)):
            refused = router.waiting.offer(
                self,
                decision.question.behind_s / STEP_S,
                now_s,
                self._waits_until_s,
                since_s=self._since_s,
                group=group,
                tokens=self._tokens,
                tried=self.tried,
                not_before_s=again_s,
                stands_back=decision.question.stands_back,
            )
        if refused is not None:
            refused.give_up_waiting()

    @property
    def _tokens(self) -> int:
        """The prompt's length, to exclude replicas that are too small; 0 if it is not exact."""
        return self.prompt.tokens if self.prompt.exact else 0

    def give_up_waiting(self) -> None:
        """Give up after waiting in vain."""
        if self.decision is None or self.decision.rejection == "full":
            wait_s = self.router.waiting.estimated_wait_s(self.router.now_s())
            why = "every replica is at its limit, and the queue is full or moves too slowly; try again"
            self.give_up(queue_full(why, wait_s))
        else:
            self.give_up(no_replica(self.decision.refusal()))

    def _sent(self, member: "Member", decision: Decision, *, streams: bool, envelope: bool = False) -> Attempt:
        """Record the attempt that is about to be sent."""
        attempt = self.attempt = self.router.sent(self, member, decision, self.prompt, streams, envelope=envelope)
        self.attempts.append(attempt)
        if self._queued_s:
            self.waited_s, self._queued_s = self.waited_s + attempt.placed.sent_s - self._queued_s, 0.0
        return attempt

    def _first_byte(self) -> None:
        now_s = self.first_byte_s = self.router.now_s()
        if self._outlook is not None:
            self.router.placement.came(self.tenant, self._outlook, now_s - self.came_s)

    def _is_answered(self) -> None:
        self._waits_until_s, self._fruitless = 0.0, 0

    def _others(self, attempt: Attempt) -> bool:
        """Return whether another replica could take the request, now or when it has room."""
        found = obstacles(self._candidates(), self._tokens, self.tried | attempt.member.server.names)
        return not {None, "full"}.isdisjoint(found)

    def _candidates(self) -> Sequence[Candidate]:
        return self.router.candidates_of(self.model_name or "")

    def _end_attempt(self, attempt: Attempt) -> None:
        self.attempt = None
        self.router.attempt_over(attempt)

    # ---- what goes wrong, by the table of `retries`

    def _next(self, row: Row) -> Next:
        if self.exchange.response_started:
            return row.sent
        return row.repeatable if self._may_repeat else row.effects

    def refused(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        if self._has_not_fetched(attempt):
            self._compute_here(attempt)
            return
        row, reason = refusal(attempt.status, body)
        self.router.learn(attempt, row, reason)
        if self._may_ask_another(attempt, row):
            attempt.cancel()
            self._end_attempt(attempt)
            self._again(attempt.member)
        elif self.exchange.response_started:  # the client has half an answer already
            attempt.cancel()
            self._end_attempt(attempt)
            self._break_off(f"{attempt.member.name} would not go on with it: {reason}")
        else:
            self._pass_on(attempt, body, complete)

    def _may_ask_another(self, attempt: Attempt, row: Row) -> bool:
        """Count a refusal; return whether to ask another replica."""
        if self._next(row) not in ("another", "resume") or not self._others(attempt):
            return False
        if row.retries == "both":
            if self._lost >= MAX_LOST:
                return False
            self._lost += 1
        return row.retries == "any" or self.router.retry_budget.take(self.router.now_s())

    def _pass_on(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        """Pass a refusal on; the rest of a long one comes like that of an answer."""
        self._start_answer(attempt, length_of(attempt.headers) or (len(body) if complete else None))
        if complete:
            self._end_attempt(attempt)
            self.exchange.finish(body)
        else:
            self.exchange.send(body)

    def _start_answer(self, attempt: Attempt, length: int | None) -> None:
        head = lines(attempt.headers, TO_CLIENT) + attempt.member.name_line
        self.exchange.start(attempt.status, head, length=length)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        """Go on at another replica after a loss, from the start or from where the answer was cut."""
        exchange, row = self.exchange, loss(broken)
        self._broke(attempt, row, str(broken))
        if self._kept is not None:
            self._kept.take()  # another replica repeats it
        self._moves += row is SILENT
        self._lost += row.retries == "three"
        if row is LATE:
            self.unfit = self.unfit | {attempt.member.name}
        if self._events is not None and self._events.is_complete:
            exchange.finish()
        elif (why_not := self._why_not_again(attempt, row)) is not None:
            if exchange.response_started:
                self._break_off(f"{attempt.member.name}: {broken}; {why_not}")
            else:
                message = f"{attempt.member.name} was lost before it answered: {broken}; {why_not}"
                self.refuse(ApiError(502, message, "server_error", code="replica_lost"))
        elif (ending := self._ending(attempt.member)) is not None:
            exchange.finish(ending)
        elif self._lost >= MAX_LOST:
            why = f"{self._lost} replicas in a row were lost while they answered it"
            self.give_up(no_replica(f"no replica could answer: {why}"))
        else:
            self.resumes += attempt.framed or exchange.sent_bytes > 0
            if row is SILENT and not attempt.member.server.suspicion:
                self.retries += 1
                self.place()  # it is heard again, by other connections
            elif self._lost == MAX_LOST - 1 and row.retries == "three":
                self.router.loop.call_later(DYING_S, exchange.guard, self._again, attempt.member)
            else:
                self._again(attempt.member)

    def _broke(self, attempt: Attempt, row: Row, reason: str) -> None:
        self.router.learn(attempt, row, reason)
        self._end_attempt(attempt)
        if row in NOT_REACHED and attempt.placed.fetched_tokens and self.prefill is not None:
            self.prefill.give_back()

    def _why_not_again(self, attempt: Attempt, row: Row) -> str | None:  # noqa: ARG002
        """The reason why no other replica may take the request over; None if one may."""
        if self.exchange.response_started:
            return "its answer has begun"
        return None if self._next(row) == "another" else "it may have had effects"

    def _ending(self, member: "Member") -> bytes | None:  # noqa: ARG002
        """The missing end of a stream that lacks nothing else, so that no replica is needed; None: it lacks more."""
        return None

    def _lose(self, attempt: Attempt, body: bytes, broken: Broken) -> None:
        """Treat the replica as lost, since its answer has failed after this part of it."""
        self.exchange.send(body)
        if body and self._events is not None:
            self._events.note(body)
        attempt.cancel()
        attempt.member.health.probe_soon(self.router.now_s())  # it may be asleep, or end
        self.failed(attempt, broken)

    def may_move(self, attempt: Attempt, members: "Sequence[Member]") -> bool:
        able = self._moves < MOST_MOVES and self._why_not_again(attempt, SILENT) is None
        name = self.model_name
        return able and any(
            one is not attempt.member and one.spec.role != "prefill" and (name is None or one.serves(name))
            for one in members
        )

    def _break_off(self, why: str) -> None:
        """End half an answer: a stream by its API's error event, anything else by cutting the connection."""
        self.why = why
        if self._events is None:
            self.exchange.cut()
            return
        error = ApiError(502, f"the answer broke off, and no other replica could continue it: {why}")
        error.type, error.code = "server_error", "broken_stream"
        self.exchange.send(self._events.error_event(error))
        self.exchange.finish()

    # ---- fields that only the router may set

    def _withhold(self, body: bytes) -> tuple[bytes, str | None]:
        """The body without these fields, and the model that it names; raise ApiError 400 unless it is a JSON object."""
        body, model, self._priority = withhold(body, self._withheld)
        return body, model

    @property
    def _withheld(self) -> tuple[str, ...]:
        names = PLACING if self.router.config.pass_kv_transfer_params else (*PLACING, *TRANSFER)
        key = self.admitted.key
        return (*names, PRIORITY) if key is not None and key.classes else names

    # ---- a prompt that is computed elsewhere

    @property
    def _source(self) -> "Member | None":
        """The replica that holds the KV of its prompt for the one that will generate; None: nothing is held."""
        return None if self.prefill is None else self.prefill.source

    def _with_kv(self, member: "Member", decision: Decision, body: bytes) -> bytes:
        """The body for this replica, with the parameters to fetch the prompt's KV if it can do so."""
        if self.prefill is None or not fetches(decision.question, member.candidate):
            return body
        return self.prefill.hand_over(body)

    @staticmethod
    def _may_resend(member: "Member", decision: Decision) -> bool:
        """Return False if the request names KV that is read once: it must not arrive twice."""
        return member.profile.shares_cache or not fetches(decision.question, member.candidate)

    def _compute_here(self, attempt: Attempt) -> None:
        """Send the request again without parameters, as the replica could not fetch the prompt's KV."""
        attempt.cancel()
        self._end_attempt(attempt)
        if self.prefill is not None:
            self.prefill.unread()
        self.retries += 1
        self.place()

    def _has_not_fetched(self, attempt: Attempt) -> bool:
        """Tell whether a refusal is vLLM's answer to KV that it could not fetch."""
        return attempt.status == 500 and attempt.placed.fetched_tokens > 0 and not self.exchange.response_started

    def _again(self, member: "Member") -> None:
        """Retry at another address: the fault of one rank may be that of all behind it."""
        self.retries += 1
        self.tried = self.tried | member.server.names | {member.name}
        self.place()

    # ---- the end

    def give_up(self, error: ApiError) -> None:
        """End the request, which no replica could answer."""
        if self.exchange.response_started:
            self._break_off(error.message)
        else:
            self.refuse(error)

    def refuse(self, error: ApiError) -> None:
        self.why = error.message
        self.router.history.counts.refused[error.code or str(error.status)] += 1
        if not self.is_over:
            self.exchange.refuse(error)

    def _over(self, exchange: Exchange) -> None:  # noqa: ARG002
        self.is_over = True
        if (attempt := self.attempt) is not None:  # it ended before its attempt did
            attempt.cancel()
            self._end_attempt(attempt)
        if self._kept is not None:
            self._kept.take()
        if self.prefill is not None:
            self.prefill.close()
        self._body = b""
        self.router.waiting.cancel(self)
        self.ended_s = self.router.now_s()
        if self._queued_s:
            self.waited_s += self.ended_s - self._queued_s
        self.router.over(self.summary())
        # Attempts refer to the request: a cycle, which would keep the body until it is collected.
        self.attempts, self.notes = [], None

    def aside(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run slow work for this request in a task; it is cancelled if the request ends before."""
        exchange = self.exchange

        async def watched() -> None:
            try:
                await work()
            except ApiError as error:
                exchange.aside = None
                self.refuse(error)
            except Exception:
                exchange.aside = None
                log.exception("A body could not be read")
                exchange.fail()

        exchange.aside = self.router.loop.create_task(watched())

    # ---- what the client does

    def client_left(self) -> None:
        """Do nothing: the attempt ends in `_over`."""

    def client_full(self) -> None:
        self._client_is_full = True
        if self.attempt is not None and self.attempt.sending is not None:
            self.attempt.sending.pause()

    def client_ready(self) -> None:
        self._client_is_full = False
        if self.attempt is not None and self.attempt.sending is not None:
            self.attempt.sending.resume()
