"""The shell of one request: it does what the request's flow asks, with the router's parts and the client's exchange.

All methods are called by the client's exchange, by the flow, or by the router when there is room; none blocks. What
depends on the kind of request is asked of its `RequestType`. `reading` makes a prompt of its body, its `answer` listens
to attempts. When it is over, the router gets a summary.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from msgspec.structs import replace

from api.errors import ApiError, class_refused, too_long
from api.generation_apis import RESPONSES, GenerationApi
from api.native import FRAMES_TYPE, REQUEST_TYPE
from engines.prompts.dates import SHOWS_DATE
from router.members.broken import no_replica
from router.members.members import Member, ServedModel
from router.placement.classes import chosen
from router.placement.cost import Prompt as AnyPrompt
from router.placement.cost import Tenant, Unread, obstacles
from router.placement.decision import Decision, predict
from router.placement.elsewhere import fetches
from router.placement.waiting import STEP_S
from router.prompts.prompt import BYTES_PER_TOKEN, UNREADABLE, Peek, Prompt, salted_for, unreadable
from router.prompts.shapes import NOT_THERE
from router.prompts.tokens import Tokens
from router.proxy.answer import Answer
from router.proxy.attempt import Attempt, prompt_use, used_by
from router.proxy.exchange import Exchange
from router.proxy.flow import OVER, Flow, RequestType
from router.proxy.headers import (
    DIRECT,
    JSON_LINE,
    TO_READ,
    TO_REPLICA,
    TRACED,
    Transport,
    session_of,
)
from router.proxy.predicted_hit import PredictedHit
from router.proxy.prefill import Prefill
from router.proxy.repetition import ASK, Repetition, is_repeatable
from router.proxy.request_summary import Notes, RequestSummary
from router.proxy.responses import new_response_id, with_id
from router.proxy.retries import Row
from router.proxy.services import Services, Waiter
from router.proxy.withheld import PLACING, PRIORITY, WITHHELD
from router.tenants.admission import Admitted
from router.tenants.limits import NOTHING, Use

log = logging.getLogger(__name__)

MAX_TENANT_BYTES = 100  # the limit for a name that a gateway gives
UNREAD = Unread()
COMPUTE_NOTHING = ("/count_tokens", "/render")  # routes whose answers are about tokens, too
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_UNSET: Any = None  # stands for a part that `reading` sets
NATIVE_TYPES = b"content-type: %b\r\naccept: %b\r\n" % (REQUEST_TYPE.encode(), FRAMES_TYPE.encode())


@dataclass(slots=True, eq=False)
class Request:
    router: Services
    exchange: Exchange
    admitted: Admitted
    arrived_s: float
    type: RequestType
    transport: Transport = DIRECT
    flow: Flow = _UNSET
    # `reading` finds these in the body:
    came_s: float = 0.0  # all of it
    body: bytes = b""
    type_line: bytes = b""  # an opaque body's own
    model_name: str | None = None  # the model that its replica has to serve; None: any replica will do
    model: ServedModel | None = None
    peek: Peek = _UNSET  # set if its prompt is read
    prompt: AnyPrompt = UNREAD  # a `Prompt` as soon as it is read
    streams: bool = False
    session: str | None = None
    priority: int | None = None  # the client's wish, where the router is to obey it
    holder: str | None = None  # the replica that has the response which it is about, or continues
    redraft: "Callable[[Request, GenerationApi], None] | None" = None  # makes the prompt of a generation again
    # These change on its way:
    attempts: list[Attempt] = field(default_factory=list)
    answer: Answer = _UNSET
    hit: PredictedHit = field(default_factory=PredictedHit)
    prefill: Prefill | None = None  # None: its prompt is computed where its answer is generated
    ended_s: float = 0.0
    notes: Notes | None = None  # kept for the request log
    trace: Any = None  # router.records.tracing.RequestTrace, whose package is an extra; None: not traced
    why: str = ""  # it ended without an answer
    output_tokens: int | None = None  # counted by the last call of `used`
    _tokens_of_model: Tokens | None = None  # the tokenizer that made its prompt
    _repeatable: bool | None = None  # None: not asked yet
    _client_is_full: bool = False

    def __post_init__(self) -> None:
        router, exchange = self.router, self.exchange
        self.came_s = self.arrived_s
        self.flow = Flow(self, router.retry_budget, router.config.queue_timeout_s, self.transport.is_single)
        self.answer = Answer(exchange, self.flow, router, self.type, self.hit)
        exchange.answerer = self
        exchange.on_end = self._over
        if self.admitted.charge is not None:
            exchange.more_lines = self._limit_lines
        if router.history.request_log is not None:
            self.notes = Notes()
        if router.tracing is not None and self.type.generation is not None:
            self.trace = router.tracing.begin(exchange.scope["headers"])

    # ---- its prompt

    def becomes(self, api: GenerationApi) -> None:
        """Go on as a generation, whose prompt replicas of ours get as tokens."""
        self.type = self.answer.type = RequestType(api.name, generation=api)
        if self.router.tracing is not None:
            self.trace = self.router.tracing.begin(self.exchange.scope["headers"])

    @property
    def withheld(self) -> tuple[str, ...]:
        """The fields that only the router may set."""
        names = PLACING if self.router.config.pass_kv_transfer_params else WITHHELD
        key = self.admitted.key
        return (*names, PRIORITY) if key is not None and key.classes else names

    def reads(self, peek: Peek) -> ServedModel:
        """Note what was read of its body; raise ApiError if no replica serves its model."""
        self.peek, self.model_name, self.streams = peek, peek.model, bool(peek.stream)
        found = session_of(self.exchange.scope["headers"], peek.prompt_cache_key)
        self.session = None if found is None else found.key
        model = self.model = self.router.members.model(peek.model)
        return model

    def prompted(self, prompt: Prompt) -> None:
        """Go on with the prompt, which is made."""
        model, kind = self.model, self.type
        assert model is not None, "it was asked to make the prompt"
        if kind.api == "batch":  # conversations after the first are not read, but counted by their bytes
            prompt.all_tokens = max(prompt.tokens, len(self.body) // BYTES_PER_TOKEN)
        self.prompt = prompt
        self._answer_is_about(prompt, model)
        if kind.generation is not None:
            self._tokens_of_model, placement = model.tokens, self.router.placement
            self.flow.prompted(0.0 if placement.outbox is None else placement.pause_s(model.candidates))
        else:
            self.flow.prompted()

    def unprompted(self) -> None:
        """Go on without a prompt."""
        self._answer_is_about(None, None)
        self.flow.prompted()

    def _answer_is_about(self, prompt: Prompt | None, model: ServedModel | None) -> None:
        answer = self.answer
        answer.prompt, answer.model, answer.model_name = prompt, model, self.model_name
        answer.body, answer.streams = self.body, self.streams
        answer.may_repeat = self.type.generation is not None or (bool(self.type.api) and self.may_repeat)
        answer.may_resume = answer.may_repeat and self.router.config.resume and not self.flow.is_single

    def made(self, made: "asyncio.Future[Prompt]") -> None:
        """Handle the prompt made by a thread."""
        if made.cancelled() or self.flow.state is OVER:
            return
        try:
            self.prompted(made.result())
        except ApiError as error:
            self.refuse(error)
        except Exception:  # a mistake of ours ends this request alone
            log.exception("A prompt could not be made")
            self.exchange.fail()
        finally:
            del made  # its error refers to this frame: a cycle, which would keep the body until it is collected

    # ---- what its flow asks: the choice

    @property
    def has_begun(self) -> bool:
        return self.exchange.response_started

    @property
    def may_repeat(self) -> bool:
        if self._repeatable is None:
            kind = self.type
            if kind.generation is not None:
                self._repeatable = True
            elif kind.api:
                self._repeatable = is_repeatable(kind.api, self.body)
            else:  # a response is known only to its holder
                is_safe = self.exchange.scope["method"] in SAFE
                self._repeatable = (kind.only_computes or is_safe) and not kind.of_response
        return self._repeatable

    def choose(self) -> Decision | None:
        flow, router = self.flow, self.router
        if flow.is_single:
            beyond = self.transport.beyond(self.exchange)
            flow.tried, flow.unfit = flow.tried | beyond, flow.unfit | beyond
        if (api := self.type.generation) is None:
            router.members.check_served(self.model_name)
        else:
            # The replicas may have changed: the present ones may make other tokens of the prompt.
            prompt, model = self.prompt, router.members.model(self.peek.model)
            self.model, tokens = model, model.tokens
            assert isinstance(prompt, Prompt) and self.redraft is not None, "a generation is read"
            made_otherwise = tokens is not self._tokens_of_model or model.lora != prompt.lora
            if not flow.is_fresh and (made_otherwise or (prompt.exact and tokens.why_not is not None)):
                if self.has_begun:
                    raise no_replica("the model has another tokenizer by now")
                flow.outdated()
                self.redraft(self, api)
                return None
        decision = flow.decision = self._choose()  # also of a request that is refused now: it is recorded
        if flow.is_new:
            router.retry_budget.requests += 1
            tenant, question = decision.question.tenant, decision.question
            if tenant is not None and tenant.service is not None and decision.rejection in (None, "full"):
                room_s = 0.0 if decision.chosen else router.waiting.wait_of(question.counts_from_s, question.now_s)
                outlook = self.hit.outlook = router.placement.outlook(decision, room_s)
                if outlook is not None and (wait_s := outlook.refused_for_s) is not None:
                    router.history.counts.classes.refused(tenant.service)  # it, or one above, would be late
                    raise class_refused(tenant.service.name, wait_s)
        if decision.rejection == "too_long":
            raise too_long(decision.refusal(), "messages" if api is not None and api.is_chat else "prompt")
        return decision

    def _choose(self) -> Decision:
        model, prompt, router, api = self.model, self.prompt, self.router, self.type.generation
        if model is None or not isinstance(prompt, Prompt):
            return self._choose_unread()
        if api is None:
            model = self.model = router.members.model(model.name)
            is_looked_up = self.type.api != "batch"  # a batch has several prompts
        else:
            is_looked_up = not self.peek.skips_cache(api.is_chat)
        holder = None if self.holder is None else self._living_holder()
        only = holder if holder is not None and holder in model.members else None
        source = None if self.prefill is None else self.prefill.source
        tenant = self._tenant() if self.admitted.key is not None or router.priorities is not None else None
        started, session, tried, came_s = perf_counter(), self.session, self.flow.tried, self.came_s
        away = tried if source is None else tried | source.server.names
        decision, matches = router.decide(model, prompt, session, away, came_s, only=only, source=source, tenant=tenant)
        if decision.chosen is None and source is not None:  # it may generate the answer itself
            decision, matches = router.decide(model, prompt, session, tried, came_s, only=only, tenant=tenant)
        router.history.counts.decision_s.observe(perf_counter() - started)
        hit = self.hit
        hit.prompt, hit.decision = prompt, decision
        if decision.chosen is not None:
            member = hit.member = router.members.by_name[decision.chosen.name]
            hit.prediction = hit.predicted_at = None
            if is_looked_up and prompt.exact and not decision.question.is_fetched:  # else it is reported elsewhere
                hit.prediction = predict(prompt, decision, member.block_size, matches)
                hit.predicted_at = None if hit.prediction is None else router.feeds.moment(member.name)
            hit.index_doubt = router.doubt(member)
        if (notes := self.notes) is not None:
            if api is None and router.config.log_prompts:
                notes.body = self.body
            members = [router.members.by_name[one.name] for one in decision.candidates]
            notes.decided(next(router.order), decision, members, router.feeds)
        return decision

    def _choose_unread(self) -> Decision:
        """Choose the least loaded replica of the model, or of all if the body names none."""
        placement, tenant = self.router.placement, None
        if self.type.caches and self._computes:
            if self.prompt is UNREAD and self.model_name is not None:
                self.prompt = Unread(max(1, len(self.body) // BYTES_PER_TOKEN))
            if (tenant := self._tenant()) is not None:
                tenant = replace(tenant, service=None)  # its first token, by which classes go, is not known
        question, _ = placement.question(
            self.prompt, {}, self.router.now_s(), tried=self.flow.tried, came_s=self.came_s, tenant=tenant
        )
        holder = self._living_holder() if self.type.of_response else None
        candidates = self.router.candidates_of(self.model_name or "") if holder is None else [holder.candidate]
        return placement.decide(question, candidates, policy="least-loaded")

    def _living_holder(self) -> Member | None:
        """The replica that alone can answer."""
        holder = None if self.holder is None else self.router.members.by_name.get(self.holder)
        return None if holder is None or holder.name in self.flow.tried else holder

    def _tenant(self) -> Tenant | None:
        """Return the party whose share of the replicas it takes; None: there are no shares."""
        key, priorities, service = self.admitted.key, self.router.priorities, None
        if key is None and priorities is None:
            return None
        if key is not None and key.classes:
            is_read = self.type.generation is not None
            service = chosen(key.classes, self.peek.service_tier, self.priority) if is_read else key.classes[0]
        if priorities is not None:
            service = priorities.service(key, service, self.exchange.scope["headers"])
        if key is None:  # all requests of a class are one tenant; no key's name begins with a parenthesis
            model = self.model_name or ""
            return None if service is None else Tenant(f"({service.name})", model, service.weight, service)
        name = key.name
        if key.tenant_header is not None:
            value = dict(self.exchange.scope["headers"]).get(key.tenant_header, b"")
            name = f"{name}/{value[:MAX_TENANT_BYTES].decode('latin-1')}"
        return Tenant(name, self.model_name or "", key.weight, service)

    # ---- what its flow asks: to a replica

    def send(self, decision: Decision) -> bool:
        assert decision.chosen is not None, "else it waits"
        member = self.router.members.by_name[decision.chosen.name]
        charge, model, single = self.admitted.charge, self.model, self.flow.is_single
        if charge is not None and not charge.is_prompted and isinstance(self.prompt, Prompt):
            use = prompt_use(self.prompt.all_tokens, self.hit.cached_tokens)
            charge.take_prompt(use, self.router.now_s())  # raises ApiError 429 if that is more than its limits leave
        if model is not None and model.splits and not single and self._computes_elsewhere(decision, model):
            return True
        exchange, answer = self.exchange, self.answer
        if self.type.generation is None:
            answer.goes_to(member)
            attempt = self.record_sent(member, decision, streams=self.streams)
            body, passed, types = self.body, TO_REPLICA, self.type_line
            path, envelope, reader = None, b"", answer.reader
            if self.prefill is not None:
                body = self._with_kv(self.prefill, member, decision, body)
            if self.type.api == RESPONSES.name and member.profile.names_responses:
                # The replica keeps a repeated response under the id that the client has.
                again = reader.response_id if isinstance(reader, Repetition) else ""
                body = with_id(body, again or self._new_id(member))
                if answer.asks_tokens(member):
                    body = body.rstrip()[:-1] + ASK + b"}"
            resend = exchange.scope["method"] in SAFE
        else:
            is_ours, prompt = member.profile.takes_envelope and not single, self.prompt
            assert isinstance(prompt, Prompt), "a generation is read"
            # Before anything is counted, since the client's body may be unusable.
            try:
                if not answer.goes_to(member):
                    return False
                if is_ours:
                    body, passed, types, path = self.body, TO_READ, NATIVE_TYPES, None
                    priority_s, new_id = decision.priority_s(self.router.now_s()), partial(self._new_id, member)
                    envelope = answer.envelope(priority_s, decision.neighbours, new_id)
                else:
                    body, path = answer.foreign_body(member)
                    if path is None and self.prefill is not None:
                        body = self._with_kv(self.prefill, member, decision, body)
                    passed, types = TO_REPLICA if answer.reader is None else TO_READ, JSON_LINE
                    envelope = b""
            except UNREADABLE as error:
                raise unreadable(error) from None
            attempt = self.record_sent(member, decision, streams=is_ours or self.streams, envelope=is_ours)
            attempt.takes_frames = is_ours
            if self.trace is not None:
                passed, types = TRACED[passed], types + self.trace.line()
            # KV that is read once is named once.
            resend = member.profile.shares_cache or attempt.placed.fetched_tokens == 0
        self.transport.send(
            exchange, self.admitted, decision, attempt, passed, types, body, path, envelope, resend=resend
        )
        if isinstance(self.prompt, Prompt) and self.prompt.shape is not None and not member.profile.takes_envelope:
            assert model is not None, "the prompt is of this model"
            if not model.tokens.is_verified_at(self.prompt, member.server.process):
                if self.prompt.doubt in (NOT_THERE, SHOWS_DATE):
                    self.hit.prediction = None  # until its shape is verified there
                if (verification := self.router.verification) is not None:
                    verification.sent(member, model, self.prompt, self.type.api, self.body)
        if self._client_is_full and attempt.sending is not None:
            attempt.sending.pause()
        if single and self.type.generation is not None:
            self.body = answer.body = b""  # the gateway has it
        return True

    def record_sent(self, member: Member, decision: Decision, *, streams: bool, envelope: bool = False) -> Attempt:
        """Record the attempt that is about to be sent."""
        if self.flow.is_single:
            envelope = member.profile.takes_envelope  # a gateway adds a header, in its place
        attempt = self.answer.attempt = self.router.sent(
            self.answer, member, decision, self.prompt, streams, envelope=envelope
        )
        self.attempts.append(attempt)
        self.flow.sent(attempt.placed.sent_s)
        return attempt

    def _new_id(self, member: Member) -> str:
        api = self.type.generation
        if api is None or api is RESPONSES:
            return new_response_id(self.admitted.cache_salt(None), member.name, self.model_name or "")
        return api.new_id()

    def _with_kv(self, prefill: Prefill, member: Member, decision: Decision, body: bytes) -> bytes:
        """The body for this replica, with the parameters to fetch the prompt's KV if it can do so."""
        return prefill.hand_over(body) if fetches(decision.question, member.candidate) else body

    def _computes_elsewhere(self, decision: Decision, model: ServedModel) -> bool:
        """Send the prompt to another replica first, if that gains; return False if it does not."""
        prompt, is_generation = self.prompt, self.type.generation is not None
        if not isinstance(prompt, Prompt) or (is_generation and self.exchange.response_started):
            return False
        if self.prefill is None:
            given = self.exchange, self.admitted, self.type.api, self.peek, self.flow.computed
            self.prefill = self.answer.prefill = Prefill(
                self.router, *given, self.session, self.came_s, self.notes, self.trace
            )
        body = salted_for(prompt, self.body) if is_generation else self.body
        attempt = self.prefill.begin(decision, model, prompt, body)
        if attempt is None:
            return False
        self.attempts.append(attempt)
        self.flow.elsewhere()
        return True

    # ---- what its flow asks: to wait, and the rest

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
                begun=self.has_begun,
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

    def wake_in(self, delay_s: float) -> None:
        self.router.loop.call_later(delay_s, self.exchange.guard, self.flow.place)

    def learn(self, row: Row, reason: str) -> None:
        if self.answer.attempt is not None:
            self.router.learn(self.answer.attempt, row, reason)

    def end_attempt(self) -> None:
        self.answer.end_attempt()

    def others(self) -> bool:
        tried = self.flow.tried
        if self.answer.attempt is not None:
            tried = tried | self.answer.attempt.member.server.names
        found = obstacles(self.router.candidates_of(self.model_name or ""), self._tokens, tried)
        return not {None, "full"}.isdisjoint(found)

    def complete(self) -> tuple[bool, str | None]:
        return self.answer.complete(self.attempts[-1])

    def refuse(self, error: ApiError) -> None:
        self.why = error.message
        self.router.history.counts.refused[error.code or str(error.status)] += 1
        if self.flow.state is not OVER:
            self.exchange.refuse(error)

    def break_off(self, why: str) -> None:
        self.why = why
        self.answer.break_off(why)

    # ---- the end

    def used(self) -> Use:
        """The tokens that it has used so far, as its key is charged."""
        prompt, attempts, prefill = self.prompt, self.attempts, self.prefill
        hit = self.hit if prefill is None or prefill.half.outcome != "handed" else prefill.half.at_replica
        if self.type.generation is None:
            return NOTHING if self.exchange.status >= 400 else self._used_unframed(hit)
        generated, self.output_tokens, told = used_by(attempts)
        if self.exchange.status >= 400 and not generated:
            return NOTHING
        if not isinstance(prompt, Prompt) or not attempts:
            return NOTHING
        if attempts[-1].status >= 400 and all(attempt.status >= 400 for attempt in attempts):
            return NOTHING  # none took it
        if told is not None:
            self.hit.reported_tokens = told.cached
            tokens = told.computed + told.cached
            if told.choices < prompt.choices:  # how much of the others was computed is not known
                tokens = max(tokens, prompt.all_tokens)
            return prompt_use(tokens, told.cached, generated)
        report = None if self.flow.resumes else attempts[-1].report
        tokens = prompt.all_tokens if report is None or report.prompt is None else report.prompt
        return prompt_use(tokens, hit.cached_tokens, generated)

    def _used_unframed(self, hit: PredictedHit) -> Use:
        """The tokens of an opaque request, as its engine reports them."""
        prompt, report = self.prompt, self.answer.report
        if self.type.of_response:  # only a background answer is charged here; its prompt was when it came
            return NOTHING if report is None or not self.answer.is_background else prompt_use(0, 0, report.tokens)
        if not isinstance(prompt, Prompt):  # embeddings and scores have a prompt, too
            decision = self.flow.decision
            if decision is None or decision.chosen is None or not self._computes:
                return NOTHING
            if report is not None and report.is_whole:
                return prompt_use(report.prompt or 0, report.cached or 0, report.tokens)
            # Its client left before the engine told: it is charged for what it has sent.
            tokens = 0 if prompt is UNREAD else prompt.tokens
            return prompt_use(tokens, 0, 0 if report is None else report.tokens)
        if all(attempt.status >= 400 for attempt in self.attempts):
            return NOTHING
        if report is None:
            return prompt_use(prompt.all_tokens, hit.cached_tokens)
        if self.type.api == RESPONSES.name and not report.is_whole:
            # Its first events repeat fields of the request, in which a client may have written any figures.
            return prompt_use(prompt.all_tokens, 0, report.counted)
        tokens = prompt.all_tokens if report.prompt is None else report.prompt
        return prompt_use(tokens, hit.cached_tokens, report.tokens)

    @property
    def _computes(self) -> bool:
        """Tell whether tokens are computed for it."""
        return not (self.type.of_response or self.exchange.scope["path"].endswith(COMPUTE_NOTHING))

    def _limit_lines(self) -> bytes:
        """The headers about the key's limits, once it is charged for what was used so far."""
        charge = self.admitted.charge
        if charge is None:
            return b""
        return charge.lines(self.router.now_s(), self.used())

    def summary(self) -> RequestSummary:
        flow, prefill, api, used = self.flow, self.prefill, self.type.generation, self.used()
        if api is None:
            self.output_tokens = None if self.answer.report is None else self.answer.report.generated
        is_conversation = bool(self.type.api)
        return RequestSummary(
            exchange=self.exchange,
            admitted=self.admitted,
            arrived_s=self.arrived_s,
            ended_s=self.ended_s,
            first_byte_s=self.answer.first_byte_s,
            waited_s=flow.waited_s,
            retries=flow.retries,
            resumes=0 if api is None else flow.resumes,
            why=self.why if is_conversation else "",
            chat=None if api is None else api.is_chat,
            model=self.model or self.router.members.models.get(self.model_name or ""),
            attempts=self.attempts if is_conversation else (),
            generation=self.hit if isinstance(self.prompt, Prompt) and flow.decision is not None else None,
            prefill=None if prefill is None or prefill.half.split is None else prefill.half,
            notes=self.notes,
            used=used,
            output_tokens=self.output_tokens if is_conversation else None,
            trace=self.trace,
        )

    def _over(self, exchange: Exchange) -> None:  # noqa: ARG002
        self.ended_s = self.router.now_s()
        self.flow.over(self.ended_s)
        if self.answer.attempt is not None:  # it ended before its attempt did
            self.answer.attempt.cancel()
            self.end_attempt()
        if self.answer.kept is not None:
            self.answer.kept.take()
        if self.prefill is not None:
            self.prefill.close()
        self.body = self.answer.body = b""
        if self.flow.since_s:
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
            except Exception:  # a mistake of ours ends this request alone
                exchange.aside = None
                log.exception("A body could not be read")
                exchange.fail()

        exchange.aside = self.router.loop.create_task(watched())

    # ---- what the client does

    def client_full(self) -> None:
        self._client_is_full = True
        if self.answer.attempt is not None and self.answer.attempt.sending is not None:
            self.answer.attempt.sending.pause()

    def client_ready(self) -> None:
        self._client_is_full = False
        if self.answer.attempt is not None and self.answer.attempt.sending is not None:
            self.answer.attempt.sending.resume()
