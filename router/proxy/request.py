"""The shell of one request: it does what the request's flow asks, with the router's parts and the client's exchange.

All methods are called by the client's exchange, by attempts, by the flow, or by the router when there is room; none
blocks. A request alone writes its fields; when it is over, the router gets a summary.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from api.errors import ApiError, class_refused, too_long
from router.members.broken import Broken
from router.placement.classes import Outlook, ServiceClass
from router.placement.cost import Prompt, Tenant, obstacles
from router.placement.decision import Decision
from router.placement.elsewhere import fetches
from router.placement.waiting import STEP_S
from router.prompts.prompt import Peek
from router.prompts.prompt import Prompt as ReadPrompt
from router.proxy.admission import Admitted
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.flow import OVER, Flow, RequestType
from router.proxy.handover import Beginning
from router.proxy.headers import TO_CLIENT, length_of, lines
from router.proxy.kept_answer import KeptAnswer, SentEvents
from router.proxy.log_notes import Notes
from router.proxy.predicted_hit import PredictedHit
from router.proxy.prefill import Prefill
from router.proxy.request_summary import RequestSummary
from router.proxy.retries import NOT_REACHED, Row, loss, refusal
from router.proxy.transport import DIRECT, Transport
from router.proxy.withheld import PLACING, PRIORITY, TRANSFER, withhold
from router.tenants.keys import Key
from router.tenants.limits import Use

if TYPE_CHECKING:
    from router.core import Router, Waiter
    from router.members.members import Member, ServedModel

log = logging.getLogger(__name__)

MOST_TENANT_BYTES = 100  # of the name that a gateway gives


@dataclass(slots=True, eq=False)
class Request:
    router: "Router"
    exchange: Exchange
    admitted: Admitted
    arrived_s: float
    type: RequestType
    transport: Transport = DIRECT
    flow: Flow = field(init=False)
    came_s: float = field(init=False)  # all of its body
    first_byte_s: float = 0.0
    ended_s: float = 0.0
    prompt: Prompt = field(init=False)
    model: "ServedModel | None" = None
    attempt: Attempt | None = None  # that is under way
    attempts: list[Attempt] = field(default_factory=list)
    hit: PredictedHit = field(default_factory=PredictedHit)
    notes: Notes | None = None  # for the request log
    why: str = ""  # it ended without an answer
    prefill: Prefill | None = None  # None: its prompt is computed where its answer is generated
    _body: bytes = b""
    _client_is_full: bool = False
    _outlook: Outlook | None = None  # None: it has no class
    _priority: int | None = None  # that its client asked for, where the router is to obey it
    _events: SentEvents | None = None  # for a client that reads events, so that its stream can end with an error
    _beginning: Beginning | None = None  # of an answer that may turn out to be an error
    _kept: KeptAnswer | None = None  # of a whole answer, which another replica can repeat

    def __post_init__(self) -> None:
        router, exchange = self.router, self.exchange
        self.came_s = self.arrived_s
        self.flow = Flow(self, router.retry_budget, router.config.queue_timeout_s, self.transport.is_single)
        exchange.answerer = self
        exchange.on_end = self._over
        if self.admitted.charge is not None:
            exchange.more_lines = self._limit_lines

    # ---- overridden by each kind of request

    def serve(self, exchange: Exchange) -> None:
        """Begin with the whole body."""
        raise NotImplementedError

    @property
    def model_name(self) -> str | None:
        """The model that its replica has to serve; None: any replica will do."""
        raise NotImplementedError

    @property
    def may_repeat(self) -> bool:
        return True

    @property
    def prompt_field(self) -> Literal["messages", "prompt"]:
        return "prompt"

    def _is_ready(self) -> bool:
        """Check the model once more before a replica is chosen; return False if the prompt is made again first."""
        return True

    def _choose(self) -> Decision:
        raise NotImplementedError

    def _send(self, member: "Member", decision: Decision) -> bool:
        """Send to this replica; return False if it cannot continue the client's part of the answer."""
        raise NotImplementedError

    def _computes_elsewhere(self, decision: Decision) -> bool:  # noqa: ARG002
        """Send the prompt to another replica first, if that gains; return False if it does not."""
        return False

    def _why_not_resumed(self) -> str | None:
        """The reason why no other replica can go on with half an answer; None if one can."""
        return "its answer has begun"

    def expected_use(self) -> Use | None:
        """The tokens of the prompt at the replica that was just chosen; None: they are known only afterwards."""
        return None

    def used(self) -> Use:
        """The tokens that it has used so far, as its key is charged."""
        raise NotImplementedError

    def summary(self) -> RequestSummary:
        flow = self.flow
        return RequestSummary(
            exchange=self.exchange,
            admitted=self.admitted,
            arrived_s=self.arrived_s,
            ended_s=self.ended_s,
            first_byte_s=self.first_byte_s,
            waited_s=flow.waited_s,
            retries=flow.retries,
            why=self.why,
            model=self.model,
            attempts=self.attempts,
            prefill=None if self.prefill is None else self.prefill.summary(),
            notes=self.notes,
            used=self.used(),
        )

    def prompted(self, prompt: ReadPrompt) -> None:
        """Go on with the prompt, which is made."""
        raise NotImplementedError

    def _open(self, attempt: Attempt, streams: bool) -> None:
        """Start the answer."""
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

    # ---- its prompt

    def _draft(self, model: "ServedModel", api: str, body: bytes, peek: Peek, salt: str | None) -> None:
        """Make the prompt: at once where that delays no other client, else on a thread."""
        draft = partial(model.tokens.draft, api, body, peek, model.lora, salt, model.max_model_len)
        if not model.tokens.is_quick(body):
            self.router.in_thread(lambda: draft().finish(), len(body), self._made)
            return
        drafted = draft()
        if drafted.is_quick:
            self.prompted(drafted.finish())
        else:
            self.router.in_thread(drafted.finish, len(body), self._made)

    def _made(self, made: "asyncio.Future[ReadPrompt]") -> None:
        """Handle the prompt made by a thread."""
        if made.cancelled() or self.flow.state is OVER:
            return
        try:
            self.prompted(made.result())
        except ApiError as error:
            self.refuse(error)
        except Exception:
            log.exception("A prompt could not be made")
            self.exchange.fail()
        finally:
            del made  # its error refers to this frame: a cycle, which would keep the body until it is collected

    # ---- what its flow asks

    @property
    def has_begun(self) -> bool:
        return self.exchange.response_started

    def choose(self) -> Decision | None:
        flow = self.flow
        if flow.is_single:
            beyond = self.transport.beyond(self.exchange)
            flow.tried, flow.unfit = flow.tried | beyond, flow.unfit | beyond
        if not self._is_ready():
            return None
        decision = self._choose()
        if flow.is_new:
            self.router.retry_budget.requests += 1
            if decision.question.tenant is not None:
                self._check_class(decision, decision.question.tenant)
        if decision.rejection == "too_long":
            raise too_long(decision.refusal(), self.prompt_field)
        return decision

    def _check_class(self, decision: Decision, tenant: Tenant) -> None:
        """Raise ApiError 503 if its class, or one above, cannot be served in time."""
        if (service := tenant.service) is None or decision.rejection not in (None, "full"):
            return
        router, question = self.router, decision.question
        room_s = 0.0 if decision.chosen else router.waiting.wait_of(question.counts_from_s, question.now_s)
        self._outlook = router.placement.outlook(decision, room_s)
        if self._outlook is not None and (wait_s := self._outlook.refused_for_s) is not None:
            router.history.counts.classes.refused(service)
            raise class_refused(service.name, wait_s)

    def send(self, decision: Decision) -> bool:
        assert decision.chosen is not None, "else it waits"
        member = self.router.members.by_name[decision.chosen.name]
        charge = self.admitted.charge
        if charge is not None and not charge.is_prompted and (use := self.expected_use()) is not None:
            charge.take_prompt(use, self.router.now_s())  # raises ApiError 429 if that is more than its limits leave
        may_split = self.model is not None and self.model.splits and not self.flow.is_single
        return (may_split and self._computes_elsewhere(decision)) or self._send(member, decision)

    def _limit_lines(self) -> bytes:
        """The headers about the key's limits, once it is charged for what was used so far."""
        charge = self.admitted.charge
        if charge is None:
            return b""
        return charge.lines(self.router.now_s(), self.used())

    def queue(self, decision: Decision, since_s: float, until_s: float, not_before_s: float) -> None:
        waiting, group, now_s = self.router.waiting, self.model_name or "", self.router.now_s()
        refused: Waiter | None = self
        # Those for a model without replicas get about half of the queue at most.
        may_wait = self.has_begun or decision.rejection == "full" or 2 * waiting.groups[group] <= waiting.capacity
        if now_s < until_s and may_wait:
            refused = waiting.offer(
                self,
                decision.question.behind_s / STEP_S,
                now_s,
                until_s,
                since_s=since_s,
                group=group,
                tokens=self._tokens,
                tried=self.flow.tried,
                not_before_s=not_before_s,
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
        self.flow.no_room_in_time(self.router.waiting.estimated_wait_s(self.router.now_s()))

    def learn(self, row: Row, reason: str) -> None:
        if self.attempt is not None:
            self.router.learn(self.attempt, row, reason)

    def end_attempt(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            self.router.attempt_over(attempt)

    def others(self) -> bool:
        tried = self.flow.tried
        if self.attempt is not None:
            tried = tried | self.attempt.member.server.names
        found = obstacles(self.router.candidates_of(self.model_name or ""), self._tokens, tried)
        return not {None, "full"}.isdisjoint(found)

    def complete(self) -> tuple[bool, str | None]:
        if self._events is not None and self._events.is_complete:
            self.exchange.finish()
            return True, None
        return False, self._why_not_resumed()

    def refuse(self, error: ApiError) -> None:
        self.why = error.message
        self.router.history.counts.refused[error.code or str(error.status)] += 1
        if self.flow.state is not OVER:
            self.exchange.refuse(error)

    def break_off(self, why: str) -> None:
        """End half an answer: a stream by its API's error event, anything else by cutting the connection."""
        self.why = why
        if self._events is None:
            self.exchange.cut()
            return
        error = ApiError(502, f"the answer broke off, and no other replica could continue it: {why}")
        error.type, error.code = "server_error", "broken_stream"
        self.exchange.send(self._events.error_event(error))
        self.exchange.finish()

    def wake_in(self, delay_s: float) -> None:
        self.router.loop.call_later(delay_s, self.exchange.guard, self.flow.place)

    # ---- to a replica

    def record_sent(self, member: "Member", decision: Decision, *, streams: bool, envelope: bool = False) -> Attempt:
        """Record the attempt that is about to be sent."""
        if self.flow.is_single:
            envelope = member.profile.takes_envelope  # a gateway adds a header, in its place
        attempt = self.attempt = self.router.sent(self, member, decision, self.prompt, streams, envelope=envelope)
        self.attempts.append(attempt)
        self.flow.sent(attempt.placed.sent_s)
        return attempt

    # ---- what its attempt tells

    def begun(self, attempt: Attempt) -> None:
        """Handle a successful response; its head may be sent on."""
        raise NotImplementedError

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        raise NotImplementedError

    def holds(self, pending_bytes: int) -> bool:
        """Claim memory for an unfinished frame; return whether there is room."""
        if self._kept is None:
            self._kept = KeptAnswer(self.router.held)
        return self._kept.hold_beside(pending_bytes)

    def refused(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        if self._has_not_fetched(attempt):
            self._compute_here(attempt)
            return
        row, reason = refusal(attempt.status, body)
        if self.flow.refused(attempt, row, reason, self.router.now_s()):
            self._pass_on(attempt, body, complete)

    def _pass_on(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        """Pass a refusal on; the rest of a long one comes like that of an answer."""
        self._start_answer(attempt, length_of(attempt.headers) or (len(body) if complete else None))
        if complete:
            self.end_attempt()
            self.exchange.finish(body)
        else:
            self.exchange.send(body)

    def _start_answer(self, attempt: Attempt, length: int | None) -> None:
        head = lines(attempt.headers, TO_CLIENT) + attempt.member.name_line
        self.exchange.start(attempt.status, head, length=length)

    def _first_byte(self) -> None:
        now_s = self.first_byte_s = self.router.now_s()
        if self._outlook is not None:
            self.router.placement.came(self.tenant, self._outlook, now_s - self.came_s)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        if self._kept is not None:
            self._kept.take()  # another replica repeats it
        if self.prefill is not None and attempt.placed.fetched_tokens and loss(broken) in NOT_REACHED:
            self.prefill.give_back()
        self.flow.broke(attempt, broken, has_bytes=self.exchange.sent_bytes > 0)

    def _lose(self, attempt: Attempt, body: bytes, broken: Broken) -> None:
        """Treat the replica as lost, since its answer has failed after this part of it."""
        self.exchange.send(body)
        if body and self._events is not None:
            self._events.note(body)
        attempt.cancel()
        attempt.member.health.probe_soon(self.router.now_s())  # it may be asleep, or end
        self.failed(attempt, broken)

    def may_move(self, attempt: Attempt, members: "Sequence[Member]") -> bool:
        """Return whether the request could continue at one of these replicas instead of waiting for its own."""
        if not self.flow.may_leave() or (self.has_begun and self._why_not_resumed() is not None):
            return False
        name = self.model_name
        return any(
            one is not attempt.member and one.spec.role != "prefill" and (name is None or one.serves(name))
            for one in members
        )

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

    def _with_kv(self, member: "Member", decision: Decision, body: bytes) -> bytes:
        """The body for this replica, with the parameters to fetch the prompt's KV if it can do so."""
        if self.prefill is None or not fetches(decision.question, member.candidate):
            return body
        return self.prefill.hand_over(body)

    def _prefills(
        self,
        decision: Decision,
        model: "ServedModel",
        api: str,
        peek: Peek,
        prompt: ReadPrompt,
        body: bytes,
        session: str | None,
        trace: Any = None,
    ) -> bool:
        """Send the prompt to another replica first, if that gains."""
        if self.prefill is None:
            given = self.exchange, self.admitted, api, peek, self.flow.computed, session, self.came_s, self.notes, trace
            self.prefill = Prefill(self.router, *given)
        attempt = self.prefill.begin(decision, model, prompt, body)
        if attempt is None:
            return False
        self.attempts.append(attempt)
        self.flow.elsewhere()
        return True

    def _begin_fetched(self, attempt: Attempt, beginning: Beginning, body: bytes, complete: bool) -> bytes | None:
        """Start the answer once it has a token; None: not yet, or it is an error and the request was sent again."""
        held = beginning.feed(body, complete)
        if held is None:
            return None
        if beginning.has_failed:
            self._compute_here(attempt)
            return None
        self._beginning = None
        self.router.placement.fetched(attempt.placed, self.router.now_s())
        self._open(attempt, True)
        return held

    def _has_not_fetched(self, attempt: Attempt) -> bool:
        """Tell whether a refusal is vLLM's answer to KV that it could not fetch."""
        return attempt.status == 500 and attempt.placed.fetched_tokens > 0 and not self.exchange.response_started

    def _compute_here(self, attempt: Attempt) -> None:
        """Send the request again without parameters, as the replica could not fetch the prompt's KV."""
        if self.prefill is not None:
            self.prefill.unread()
        self.flow.unread(attempt)

    # ---- the end

    def _over(self, exchange: Exchange) -> None:  # noqa: ARG002
        self.ended_s = self.router.now_s()
        self.flow.over(self.ended_s)
        if self.attempt is not None:  # it ended before its attempt did
            self.attempt.cancel()
            self.end_attempt()
        if self._kept is not None:
            self._kept.take()
        if self.prefill is not None:
            self.prefill.close()
        self._body = b""
        self.router.waiting.cancel(self)
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

    def client_full(self) -> None:
        self._client_is_full = True
        if self.attempt is not None and self.attempt.sending is not None:
            self.attempt.sending.pause()

    def client_ready(self) -> None:
        self._client_is_full = False
        if self.attempt is not None and self.attempt.sending is not None:
            self.attempt.sending.resume()
