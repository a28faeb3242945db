"""The shell of one request: it does what the request's flow asks, with the router's parts and the client's exchange.

All methods are called by the client's exchange, by the flow, or by the router when there is room; none blocks. What
depends on the kind of request is asked of its `RequestType`. `reading` makes a prompt of its body, its `answer` listens
to attempts. When it is over, the router gets a summary.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from api.errors import ApiError, class_refused, too_long
from api.generation_apis import RESPONSES, GenerationApi
from api.native import FRAMES_TYPE, REQUEST_TYPE
from engines.prompts.dates import SHOWS_DATE
from router.members.asking import Asking
from router.members.broken import no_replica
from router.members.members import Member, ServedModel
from router.placement.cost import obstacles
from router.placement.decision import Decision
from router.placement.elsewhere import fetches
from router.placement.sessions import name_of
from router.placement.waiting import STEP_S
from router.prompts.prompt import UNREADABLE, Prompt, salted_for, unreadable
from router.prompts.shapes import NOT_THERE
from router.prompts.tokens import Tokens
from router.proxy.answer import Answer
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.facts import RequestFacts, choose, prompt_use, used
from router.proxy.flow import OVER, Flow, RequestType
from router.proxy.headers import JSON_LINE, TO_READ, TO_REPLICA, TRACED
from router.proxy.prefill import Prefill
from router.proxy.progress import Progress
from router.proxy.request_summary import RequestSummary
from router.proxy.responses import new_response_id, with_id
from router.proxy.retries import Row
from router.proxy.services import Waiter
from router.proxy.streams.repetition import ASK, Repetition, is_repeatable

log = logging.getLogger(__name__)

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
NATIVE_TYPES = b"content-type: %b\r\naccept: %b\r\n" % (REQUEST_TYPE.encode(), FRAMES_TYPE.encode())
_UNSET: Any = None  # stands for what is made at once, and given up at the end


@dataclass(slots=True, eq=False)
class Request(RequestFacts):
    answer: Answer = _UNSET
    redraft: "Callable[[Request, GenerationApi], None] | None" = None  # makes the prompt of a generation again
    _tokens_of_model: Tokens | None = None  # the tokenizer that made its prompt
    _client_is_full: bool = False

    def __post_init__(self) -> None:
        router, exchange = self.router, self.exchange
        self.came_s = self.arrived_s
        self.flow = Flow(self, router.retry_budget, router.config.queue_timeout_s, self.transport.is_single)
        self.answer = Answer(self, exchange, self.flow, router, Progress(self))
        exchange.answerer = self
        exchange.on_end = self._over
        if (charge := self.admitted.charge) is not None:  # it is charged for what was used so far
            exchange.more_lines = lambda: charge.lines(router.now_s(), used(self)[0])
        if router.tracing is not None and self.type.generation is not None:
            self.trace = router.tracing.begin(exchange.scope["headers"])

    # ---- its prompt

    def becomes(self, api: GenerationApi) -> None:
        """Go on as a generation, whose prompt replicas of ours get as tokens."""
        self.type = RequestType(api.name, generation=api)
        if self.router.tracing is not None:
            self.trace = self.router.tracing.begin(self.exchange.scope["headers"])

    def prompted(self, prompt: Prompt | None) -> None:
        """Go on with the prompt, which is made; None: it is not read."""
        kind, pause_s = self.type, 0.0
        if prompt is not None:
            self.prompt, model, asking = prompt, self.model, self.router.asking
            if prompt.reason is not None and model is not None:  # few have one
                if asking is not None and asking.wants(model.tokens, prompt):
                    self.aside(partial(self.be_told, asking, model, prompt))
                    return
                model.tokens.approximated[prompt.reason] += 1
        if kind.generation is not None:
            assert self.model is not None, "it was asked to make the prompt"
            self.may_repeat, self._tokens_of_model, placement = True, self.model.tokens, self.router.placement
            pause_s = 0.0 if placement.outbox is None else placement.pause_s(self.model.candidates)
        elif kind.api:
            self.may_repeat = is_repeatable(kind.api, self.body)
        elif not kind.of_response:  # one is known only to its holder
            self.may_repeat = kind.only_computes or self.exchange.scope["method"] in SAFE
        self.may_resume = self.may_repeat and self.router.config.resume and not self.flow.is_single
        self.flow.prompted(pause_s)

    async def be_told(self, asking: Asking, model: ServedModel, prompt: Prompt) -> None:
        """Have the prompt's tokens told by an engine."""
        await asking.tell(model, prompt, self.type.api, self.body)
        self.exchange.aside = None
        self.prompted(prompt)

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

    def choose(self) -> Decision | None:
        flow, router, hit = self.flow, self.router, self.hit
        if flow.is_single:
            beyond = self.transport.beyond(self.exchange)
            flow.tried, flow.unfit = flow.tried | beyond, flow.unfit | beyond
        if (api := self.type.generation) is None:
            router.members.check_served(self.model_name)
        else:
            # The replicas may have changed: the present ones may make other tokens of the prompt.
            prompt, members, name = self.prompt, router.members, self.peek.model
            model = self.model = members.models.get(name) or members.model(name)
            tokens = model.tokens
            assert isinstance(prompt, Prompt) and self.redraft is not None, "a generation is read"
            made_otherwise = tokens is not self._tokens_of_model or model.lora != prompt.lora
            if not flow.is_fresh and (
                made_otherwise or (prompt.exact and not prompt.asked and tokens.why_not is not None)
            ):
                if self.has_begun:
                    raise no_replica("the model has another tokenizer by now")
                flow.outdated()
                self.redraft(self, api)
                return None
        prefill = self.answer.prefill
        decision = choose(self, None if prefill is None else prefill.source)
        flow.decision = decision  # also of a request that is refused now: it is recorded
        if flow.is_new:
            router.retry_budget.requests += 1
            question = decision.question
            tenant = question.tenant
            if tenant is not None and tenant.service is not None and decision.rejection in (None, "full"):
                room_s = 0.0 if decision.chosen else router.waiting.wait_of(question.counts_from_s, question.now_s)
                hit.outlook = router.placement.outlook(decision, room_s)
                if hit.outlook is not None and (wait_s := hit.outlook.refused_for_s) is not None:
                    router.history.counts.classes.refused(tenant.service)  # it, or one above, would be late
                    raise class_refused(tenant.service.name, wait_s)
        if decision.rejection == "too_long":
            raise too_long(decision.refusal(), "messages" if api is not None and api.is_chat else "prompt")
        return decision

    # ---- what its flow asks: to a replica

    def send(self, decision: Decision) -> bool:
        assert decision.chosen is not None, "else it waits"
        member, prompt = self.router.members.by_name[decision.chosen.name], self.prompt
        charge, model, single = self.admitted.charge, self.model, self.flow.is_single
        if charge is not None and not charge.is_prompted and isinstance(prompt, Prompt):
            use = prompt_use(prompt.all_tokens, self.hit.cached_tokens)
            charge.take_prompt(use, self.router.now_s())  # raises ApiError 429 if that is more than its limits leave
        if model is not None and model.splits and not single and self._computes_elsewhere(decision, model):
            return True
        answer, progress, path, envelope = self.answer, self.answer.progress, None, b""
        answer.beginning = None
        if self.type.generation is None:
            progress.goes_to(member)
            attempt = self.record_sent(member, decision, streams=self.streams)
            passed, types, resend = TO_REPLICA, self.type_line, self.exchange.scope["method"] in SAFE
            body = self.body
            if self.type.api == RESPONSES.name and member.profile.names_responses:
                # The replica keeps a repeated response under the id that the client has.
                again = progress.reader.response_id if isinstance(progress.reader, Repetition) else ""
                body = with_id(body, again or self._new_id(member))
                if progress.asks_tokens(member):
                    body = body.rstrip()[:-1] + ASK + b"}"
        else:
            is_ours = member.profile.takes_envelope and not single
            # Before anything is counted, since the client's body may be unusable.
            try:
                if not progress.goes_to(member):
                    return False
                if is_ours:
                    body, passed, types = self.body, TO_READ, NATIVE_TYPES
                    envelope = progress.envelope(decision, self.router.now_s(), partial(self._new_id, member))
                else:
                    body, path = progress.foreign_body(member)
                    passed, types = TO_REPLICA if progress.reader is None else TO_READ, JSON_LINE
            except UNREADABLE as error:
                raise unreadable(error) from None
            attempt = self.record_sent(member, decision, streams=is_ours or self.streams, envelope=is_ours)
            attempt.takes_frames = is_ours
            if self.trace is not None:
                passed, types = TRACED[passed], types + self.trace.line()
            # KV that is read once is named once.
            resend = member.profile.shares_cache or attempt.placed.fetched_tokens == 0
        prefill = None if path is not None or envelope else answer.prefill
        if prefill is not None and fetches(decision.question, member.candidate):
            body = prefill.hand_over(body)
        self.transport.send(self.exchange, self.admitted, attempt, passed, types, body, path, envelope, resend=resend)
        if isinstance(prompt, Prompt) and prompt.shape is not None and not member.profile.takes_envelope:
            assert model is not None, "the prompt is of this model"
            if not model.tokens.is_verified_at(prompt, member.server.process):
                if prompt.doubt in (NOT_THERE, SHOWS_DATE):
                    self.hit.prediction = None  # until its shape is verified there
                if (verification := self.router.verification) is not None:
                    verification.sent(member, model, prompt, self.type.api, self.body)
        if self._client_is_full and attempt.sending is not None:
            attempt.sending.pause()
        if single and self.type.generation is not None:
            self.body = b""  # the gateway has it
        return True

    def record_sent(self, member: Member, decision: Decision, *, streams: bool, envelope: bool = False) -> Attempt:
        if self.flow.is_single:
            envelope = member.profile.takes_envelope  # a gateway adds a header, in its place
            streams = streams and self.exchange.is_watched  # else nobody hears of the first token
        attempt = self.attempt = self.router.sent(
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

    def _computes_elsewhere(self, decision: Decision, model: ServedModel) -> bool:
        """Send the prompt to another replica first, if that gains; return False if it does not."""
        prompt, is_generation, answer = self.prompt, self.type.generation is not None, self.answer
        if not isinstance(prompt, Prompt) or (is_generation and self.has_begun):
            return False
        if answer.prefill is None:
            answer.prefill = Prefill(self, self.router, self.flow.computed)
            self.half = answer.prefill.half
        body = salted_for(prompt, self.body) if is_generation else self.body
        attempt = answer.prefill.begin(decision, model, prompt, body)
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
        if decision.rejection == "held":
            question, waiting, may_wait = decision.question, self.router.newcomers, True
            self.router.placement.working_sets[question.model].wait(question, until_s)
            group = f"{question.model}/{name_of(question)}"
        if now_s < until_s and may_wait:
            refused = waiting.offer(
                self,
                decision.question.behind_s / STEP_S,
                now_s,
                until_s,
                since_s=since_s,
                group=group,
                tokens=self.exact_tokens,
                tried=self.flow.tried,
                not_before_s=not_before_s,
                stands_back=decision.question.stands_back,
                begun=self.has_begun,
            )
        if refused is not None:
            refused.give_up_waiting()

    def give_up_waiting(self) -> None:
        router, decision = self.router, self.flow.decision
        wait_s = router.waiting.estimated_wait_s(router.now_s())
        if decision is not None and decision.rejection == "held":
            working_set = router.placement.working_sets[decision.question.model]
            wait_s = working_set.come_again_s(name_of(decision.question), router.now_s())
        self.flow.no_room_in_time(wait_s)

    def wake_in(self, delay_s: float) -> None:
        self.router.loop.call_later(delay_s, self.exchange.guard, self.flow.place)

    def learn(self, row: Row, reason: str) -> None:
        if self.attempt is not None:
            self.router.learn(self.attempt, row, reason)

    def others(self) -> bool:
        tried = self.flow.tried
        if self.attempt is not None:
            tried = tried | self.attempt.member.server.names
        found = obstacles(self.router.candidates_of(self.model_name or ""), self.exact_tokens, tried)
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

    def _over(self, exchange: Exchange) -> None:  # noqa: ARG002
        flow, api, is_conversation, ended_s = self.flow, self.type.generation, bool(self.type.api), self.router.now_s()
        flow.over(ended_s)
        if self.attempt is not None:  # it ended before its attempt did
            self.attempt.cancel()
            self.end_attempt()
        if self.answer.kept is not None:
            self.answer.kept.take()
        if self.answer.prefill is not None:
            self.answer.prefill.close()
        self.body = b""
        if flow.since_s:
            self.router.waiting.cancel(self)
            self.router.newcomers.cancel(self)
        use, output_tokens = used(self)
        self.router.over(
            RequestSummary(
                exchange=self.exchange,
                admitted=self.admitted,
                arrived_s=self.arrived_s,
                ended_s=ended_s,
                first_byte_s=self.first_byte_s,
                waited_s=flow.waited_s,
                retries=flow.retries,
                resumes=0 if api is None else flow.resumes,
                why=self.why if is_conversation else "",
                chat=None if api is None else api.is_chat,
                model=self.model or self.router.members.models.get(self.model_name or ""),
                attempts=self.attempts if is_conversation else (),
                generation=self.hit if isinstance(self.prompt, Prompt) and flow.decision is not None else None,
                prefill=None if self.half is None or self.half.split is None else self.half,
                logged=self.logged,
                used=use,
                output_tokens=output_tokens if is_conversation else None,
                trace=self.trace,
            )
        )
        # These refer to the request: a cycle, which would keep it until it is collected.
        self.attempts, self.answer = [], _UNSET

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
        if self.attempt is not None and self.attempt.sending is not None:
            self.attempt.sending.pause()

    def client_ready(self) -> None:
        self._client_is_full = False
        if self.attempt is not None and self.attempt.sending is not None:
            self.attempt.sending.resume()
