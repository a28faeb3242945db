"""One generation request: its prompt is made, its answer is continued by another replica if one fails.

A prompt is made at once, on a thread or, for a large body, in another process.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from api.errors import ApiError
from api.generation_apis import CHAT, RESPONSES, GenerationApi
from api.native import FRAMES_TYPE, REQUEST_TYPE
from api.responses import CONTENT_TYPE
from router.members.broken import Broken, no_replica
from router.members.members import Member
from router.placement.classes import ServiceClass, chosen
from router.placement.cost import can_take
from router.placement.decision import Decision
from router.placement.elsewhere import fetches
from router.prompts.canonical import peek_of
from router.prompts.prompt import (
    UNREADABLE,
    Peek,
    Prompt,
    forget_others,
    read_peek,
    salted_for,
    unreadable,
)
from router.prompts.reading.client import is_quick
from router.prompts.reading.messages import Found, Make
from router.prompts.tokens import Tokens
from router.proxy.aborts import ABORTED, is_aborted, is_servers_error
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.handover import Beginning
from router.proxy.headers import (
    FROM_FRAMES,
    JSON_LINE,
    TO_CLIENT,
    TO_READ,
    TO_REPLICA,
    TRACED,
    length_of,
    lines,
    value_of,
)
from router.proxy.kept_answer import KeptAnswer, SentEvents
from router.proxy.large_prompts import make_for, prompt_from
from router.proxy.log_notes import Notes
from router.proxy.predicted_hit import CACHED
from router.proxy.request import Request
from router.proxy.request_summary import RequestSummary
from router.proxy.responses import new_response_id
from router.proxy.resumable_response import ResumableResponse
from router.proxy.sessions import session_of
from router.proxy.token_use import Generated, generated_by, prompt_use, prompts_told
from router.proxy.withheld import peek_withheld
from router.tenants.keys import Key
from router.tenants.limits import NOTHING, Use

JSON_TYPE = b"application/json"
SSE_TYPE = CONTENT_TYPE.encode()
NATIVE_TYPES = b"content-type: %b\r\naccept: %b\r\n" % (REQUEST_TYPE.encode(), FRAMES_TYPE.encode())


def peek_into(api: GenerationApi, body: bytes, peek: Peek | None = None) -> Peek:
    """The fields that the router reads of this API's requests; `peek`: those that chats and completions have."""
    peek = peek or read_peek(body)
    if peek.prompt is not None or not api.is_chat:
        forget_others(peek, api)
    if api.inner is not None and (conversation := peek_of(api.name, body, peek.model)) is not None:
        peek.messages = conversation.messages  # with what stands beside them there
    return peek


@dataclass(slots=True, eq=False)
class Generation(Request):
    api: GenerationApi = field(init=False)
    peek: Peek = field(init=False)
    prompt: Prompt = field(init=False)
    generated: Generated | None = None  # when it was last asked what it has used
    trace: Any = None  # router.records.tracing.RequestTrace, whose package is an extra; None: not traced
    _tokens_of_model: Tokens = field(init=False)
    _response: ResumableResponse = field(init=False)

    def __post_init__(self) -> None:
        Request.__post_init__(self)  # super() would fail: `slots` makes a new class
        router = self.router
        self.api = self.type.generation or CHAT
        if router.history.request_log is not None:
            self.notes = Notes()
        if router.tracing is not None:
            self.trace = router.tracing.begin(self.exchange.scope["headers"])

    @property
    def model_name(self) -> str:
        return self.peek.model

    @property
    def prompt_field(self) -> Literal["messages", "prompt"]:
        return "messages" if self.api.is_chat else "prompt"

    @property
    def session(self) -> str | None:
        session = session_of(self.exchange.scope["headers"], self.peek.prompt_cache_key)
        return None if session is None else session.key

    def _service_of(self, key: Key) -> ServiceClass | None:
        return chosen(key.classes, self.peek.service_tier, self._priority)

    def serve(self, exchange: Exchange) -> None:
        """Begin with the whole body."""
        router, body = self.router, exchange.take_body()
        self._body = body
        self.came_s = router.now_s()
        self.flow.body()
        if self.notes is not None and router.config.log_prompts:
            self.notes.body = bytes(body)
        try:
            if is_quick(body):
                self._body, peek, self._priority = peek_withheld(body, self._withheld)
                self._make_prompt(peek)
            else:
                self.aside(partial(self._read_apart, body))
        except ApiError as error:
            self.refuse(error)

    def prompted(self, prompt: Prompt) -> None:
        model = self.model
        assert model is not None, "it was asked to make the prompt"
        self.prompt, self._tokens_of_model = prompt, model.tokens
        may_resume = self.router.config.resume and not self.flow.is_single
        self._response = ResumableResponse(self.api, prompt, self._body, model.tokens, may_resume)
        self.flow.prompted(self.router.placement.pause_s(model.candidates))

    def _make_prompt(self, peek: Peek | None = None) -> None:
        """Make the prompt where that delays no other client; `peek`: the body's, which is quick to read."""
        body = self._body
        if peek is None and not is_quick(body):
            self.aside(partial(self._read_apart, body))
            return
        self.peek = peek_into(self.api, body, peek)
        model = self.model = self.router.members.model(self.peek.model)
        salt = self.admitted.cache_salt(self.peek.cache_salt)
        self._draft(model, self.api.name, body, self.peek, salt)

    async def _read_apart(self, body: bytes) -> None:
        """Have a large body read in another process."""
        salt: str | None = None

        def want(found: Found) -> Make:
            nonlocal salt
            self.peek = Peek(**found.fields)
            salt = self.admitted.cache_salt(self.peek.cache_salt)
            model = self.model = self.router.members.model(self.peek.model)
            return make_for(model, self.api.name, salt)

        body, _ = await asyncio.to_thread(self._withhold, body)
        self._body = body
        made = await self.router.reading.read(body, want)
        self.exchange.aside = None
        assert made is not None and self.model is not None, "it was wanted"
        prompt = prompt_from(made, self.model, self.peek, salt)
        self._body = self._body if made.body is None else made.body  # None: it is unchanged
        self.exchange.hold(len(self._body) + sum(map(len, prompt.packed)))
        self.prompted(prompt)

    # ---- what it uses

    def expected_use(self) -> Use:
        return prompt_use(self.prompt.all_tokens, self.hit.cached_tokens)

    def used(self) -> Use:
        generated = self.generated = generated_by(self.attempts)
        if self.exchange.status >= 400 and not generated.tokens:
            return NOTHING
        attempts = self.attempts
        if not attempts or (attempts[-1].status >= 400 and all(attempt.status >= 400 for attempt in attempts)):
            return NOTHING  # none took it
        prompt = self.prompt
        if (told := prompts_told(self.attempts)) is not None:
            self.hit.reported_tokens = told.cached
            tokens = told.computed + told.cached
            if told.choices < prompt.choices:  # how much of the others was computed is not known
                tokens = max(tokens, prompt.all_tokens)
            return prompt_use(tokens, told.cached, generated.tokens)
        report = None if self.flow.resumes else self.attempts[-1].report
        tokens = prompt.all_tokens if report is None or report.prompt is None else report.prompt
        hit = self.hit if self.prefill is None or self.prefill.outcome != "handed" else self.prefill.hit
        return prompt_use(tokens, hit.cached_tokens, generated.tokens)

    # ---- the choice

    def _choose(self) -> Decision:
        router, model = self.router, self.model
        assert model is not None, "it is ready"
        is_looked_up = not self.peek.skips_cache(self.api.is_chat)
        decision = self.hit.decide(
            router,
            model,
            self.prompt,
            self.session,
            self.flow.tried,
            self.came_s,
            is_looked_up=is_looked_up,
            tenant=self.tenant,
            source=None if self.prefill is None else self.prefill.source,
        )
        if self.notes is not None:
            self.notes.decided(next(router.order), decision, model.members, router.feeds)
        return decision

    def _computes_elsewhere(self, decision: Decision) -> bool:
        model = self.model
        if model is None or self.exchange.response_started:
            return False
        body = salted_for(self.prompt, self._body)
        return self._prefills(decision, model, self.api.name, self.peek, self.prompt, body, self.session, self.trace)

    def _is_ready(self) -> bool:
        model = self.model = self.router.members.model(self.peek.model)  # the replicas may have changed
        # Its tokens may differ from those of the present replicas.
        made_otherwise = model.tokens is not self._tokens_of_model or model.lora != self.prompt.lora
        is_outdated = made_otherwise or (self.prompt.exact and model.tokens.why_not is not None)
        if self.flow.is_fresh or not is_outdated:
            return True
        if self.has_begun:
            raise no_replica("the model has another tokenizer by now")
        self.flow.outdated()
        self._make_prompt()
        return False

    # ---- to a replica

    def _send(self, member: Member, decision: Decision) -> bool:
        response, exchange = self._response, self.exchange
        self._beginning = None
        is_ours = member.profile.takes_envelope and not self.flow.is_single
        # Before anything is counted, since the client's body may be unusable.
        try:
            if not exchange.response_started or response.is_unsaid(exchange.sent_bytes):
                response.begin(member)
            elif not response.can_go_on(member, exchange.sent_bytes > 0):
                return False
            if is_ours:
                body, passed, types, path = self._body, TO_READ, NATIVE_TYPES, None
                new_id = partial(self._new_id, member)
                envelope = response.envelope(decision.priority_s(self.router.now_s()), decision.neighbours, new_id)
            else:
                body, path = response.foreign_body(member)
                body = self._with_kv(member, decision, body) if path is None else body
                passed, types = TO_REPLICA if response.continuation is None else TO_READ, JSON_LINE
                envelope = b""
        except UNREADABLE as error:
            raise unreadable(error) from None
        streams = is_ours or bool(self.peek.stream)
        attempt = self.record_sent(member, decision, streams=streams, envelope=is_ours)
        attempt.takes_frames = is_ours
        if self.trace is not None:
            passed, types = TRACED[passed], types + self.trace.line()
        # KV that is read once is named once.
        resend = member.profile.shares_cache or not fetches(decision.question, member.candidate)
        self.transport.send(
            exchange, self.admitted, decision, attempt, passed, types, body, path, envelope, resend=resend
        )
        if self.prompt.shape is not None and not member.profile.takes_envelope:
            self.hit.verify(self.router, self.model, self.prompt, self.api.name, self._body)
        if self._client_is_full and attempt.sending is not None:
            attempt.sending.pause()
        if self.flow.is_single:
            self._body = b""  # the gateway has it
        return True

    def _new_id(self, member: Member) -> str:
        if self.api is not RESPONSES:
            return self.api.new_id()
        return new_response_id(self.admitted.cache_salt(None), member.name, self.peek.model)

    # ---- from the replica to the client

    def begun(self, attempt: Attempt) -> None:
        exchange = self.exchange
        self.flow.head()
        self.router.answered(attempt)
        if attempt.cached_tokens is not None and not self.flow.resumes:
            self.hit.reported_tokens = attempt.cached_tokens
            if self.prefill is not None and self.flow.decision is not None:
                self.prefill.found(self.flow.decision, attempt.cached_tokens)
        if exchange.response_started or exchange.disconnected:
            return  # another replica has begun the response
        if self.flow.is_single:
            self._start_answer(attempt, None)
            return
        if attempt.framed:
            if self.peek.stream:  # a whole answer comes at the end, in one piece
                self._start_framed(attempt, SSE_TYPE)
                self._events = SentEvents(self.api)
            return
        streams = (value_of(attempt.headers, b"content-type") or b"").startswith(SSE_TYPE)
        if not streams:
            self._response.continuation = None
            if not self.peek.stream:
                return  # until it is complete, another replica can repeat it
        elif attempt.placed.fetched_tokens:
            self._beginning = Beginning(self.api.name)
            return
        self._open(attempt, streams)

    def _open(self, attempt: Attempt, streams: bool) -> None:
        length = None if self._response.continuation is not None else length_of(attempt.headers)
        if streams and length is None:
            self._events = SentEvents(self.api)
        self._start_answer(attempt, length)

    def _start_framed(self, attempt: Attempt, usual_type: bytes) -> None:
        content_type = value_of(attempt.headers, b"x-warmroute-content-type") or usual_type
        self.exchange.start(attempt.status, self._head(attempt, content_type, FROM_FRAMES))

    def _head(self, attempt: Attempt, content_type: bytes | None, dropped: frozenset[bytes]) -> bytes:
        head = lines(attempt.headers, dropped) + attempt.member.name_line
        return head if content_type is None else b"content-type: %b\r\n" % content_type + head

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        exchange = self.exchange
        if body and not attempt.begun_s:
            self.router.computed(attempt)
        if self._beginning is not None:
            held = self._begin_fetched(attempt, self._beginning, body, complete)
            if held is None:
                return
            body = held
        if not self.first_byte_s:
            self._first_byte()
        # A stream comes in many parts, and few of them have a report: only those are worth a call.
        if CACHED in body and self.hit.reported_tokens is None and not attempt.framed and not self.flow.resumes:
            self.hit.read(self.router, self.model, self.prompt, attempt.member, body)
        if attempt.report is not None:
            attempt.report.read(body)
        if self._response.continuation is not None:
            body, lost = self._response.read(body, complete)
            if attempt.report is not None:
                attempt.report.counted = self._response.continuation.new_tokens or attempt.report.counted
            if lost is not None:
                self._lose(attempt, body, Broken(lost))
                return
        elif self._events is not None and not attempt.framed:
            if not exchange.sent_bytes and is_servers_error(body):
                self._lose(attempt, b"", Broken("its stream is an error"))
                return
            if (b'"abort"' in body or not self._events.is_between) and (
                before := self._events.before_abort(body)
            ) is not None:
                self._lose(attempt, before, Broken(ABORTED))
                return
        if complete:
            self._complete(attempt, body)
        elif exchange.response_started:
            if body:
                exchange.send(body)
                if self._events is not None:
                    self._events.note(body)
            else:
                exchange.flush()
        else:
            self._keep(attempt, body)

    def _keep(self, attempt: Attempt, body: bytes) -> None:
        """Keep a part of an unstreamed answer, which another replica could repeat; send a long one on."""
        if self._kept is None:
            self._kept = KeptAnswer(self.router.held)
        if self._kept.keep(body):
            return
        kept = self._kept.take()
        if attempt.framed:
            self._start_framed(attempt, JSON_TYPE)
        else:
            self._start_answer(attempt, length_of(attempt.headers))
        self.exchange.send(kept)
        self.exchange.send(body)

    def _complete(self, attempt: Attempt, body: bytes) -> None:
        exchange = self.exchange
        if self._events is None and not attempt.framed and attempt.status < 400 and not self.flow.is_single:
            if self._kept is not None:
                body = self._kept.take() + body
            if is_aborted(self.api.name, body, attempt.member.profile):
                self._lose(attempt, b"", Broken(ABORTED))
                return
        # A long refusal is passed on like an answer, and comes to its end here.
        self.end_attempt()
        if exchange.response_started:
            exchange.finish(body)
            return
        if attempt.framed:
            content_type = value_of(attempt.headers, b"x-warmroute-content-type") or JSON_TYPE
            head = self._head(attempt, content_type, FROM_FRAMES)
        else:
            head = self._head(attempt, None, TO_CLIENT)
        exchange.answer(attempt.status, head, body if self._kept is None else self._kept.take() + body)

    # ---- what goes wrong

    def _pass_on(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        self._response.continuation = None
        Request._pass_on(self, attempt, body, complete)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        self._response.keep(attempt)
        Request.failed(self, attempt, broken)

    def complete(self) -> tuple[bool, str | None]:
        exchange, attempt = self.exchange, self.attempts[-1]
        if self._events is not None and self._events.is_complete:
            exchange.finish()
            return True, None
        why_not = self._response.settle(attempt, exchange.sent_bytes > 0)
        if why_not is None and self._events is None:
            why_not = "the client has a part of a whole answer already"
        if why_not is None and (ending := self._response.ending(attempt.member)) is not None:
            exchange.finish(ending)
            return True, None
        return False, why_not

    def may_move(self, attempt: Attempt, members: Sequence[Member]) -> bool:
        """Return whether the request could continue at one of these replicas instead of waiting for its own."""
        if not self.flow.may_leave():
            return False
        exchange, own = self.exchange, attempt.member
        started = exchange.response_started and not self._response.is_unsaid(exchange.sent_bytes)
        longest = own.candidate.max_model_len
        for member in members:
            one = member.candidate
            if member is own:
                able = one.unavailable is None
            else:
                able = can_take(one, self._tokens, self.flow.tried) and member.serves(self.peek.model)
                # The generated tokens are part of the prompt there.
                able = able and (not started or one.max_model_len is None or one.max_model_len >= (longest or 0))
            if able and (not started or (self._events is not None and self._response.may_move(attempt, member))):
                return True
        return False

    # ---- the end

    def summary(self) -> RequestSummary:
        decision = self.flow.decision
        summary = Request.summary(self)
        summary.chat, summary.resumes, summary.trace = self.api.is_chat, self.flow.resumes, self.trace
        summary.generation = None if decision is None else self.hit.summary(self.peek, self.prompt, decision)
        summary.output_tokens = None if self.generated is None else self.generated.told
        return summary
