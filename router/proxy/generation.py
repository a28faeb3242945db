"""One generation request: from its body to a replica, from there to its client, and to another replica if one fails."""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal

from api.errors import ApiError
from api.generation_apis import CHAT, RESPONSES, GenerationApi
from api.native import FRAMES_TYPE, REQUEST_TYPE
from api.sse import CONTENT_TYPE
from router.members.broken import Broken
from router.members.feeds import Moment
from router.members.members import Member, ServedModel, no_replica
from router.placement.decision import Decision
from router.placement.eligibility import can_take
from router.placement.placement import Prediction
from router.prompts.canonical import peek_of
from router.prompts.prompt import UNREADABLE, Peek, Prompt, read_peek, unreadable
from router.prompts.reading.client import is_quick
from router.prompts.reading.messages import Found, Make
from router.prompts.shapes import NOT_THERE
from router.prompts.tokens import Tokens
from router.proxy.attempt import Attempt, refusal_code
from router.proxy.exchange import Exchange
from router.proxy.headers import (
    FROM_FRAMES,
    TO_CLIENT,
    TO_FOREIGN,
    TO_NATIVE,
    TO_READ,
    TRACED,
    lines,
    request_to,
    value_of,
)
from router.proxy.large_prompts import make_for, prompt_from
from router.proxy.log_notes import Notes
from router.proxy.request import RESTING, Request
from router.proxy.request_summary import GenerationSummary, RequestSummary, exactness
from router.proxy.resumable_response import ResumableResponse
from router.proxy.sessions import session_of

log = logging.getLogger(__name__)

MAX_LOST = 3  # replicas that one request may lose before it is given up
DYING_S = 0.5  # before the last try: replicas of a machine that dies do not all end at the same moment
MOST_MOVES = 3  # then it waits for the silent one: on a stalled machine, all seem silent
REFUSALS = frozenset({429, 500, 502, 503, 504})  # that another replica may not give
MAX_KEPT_BYTES = 4 * 1024 * 1024  # of an unstreamed answer, so that another replica can repeat it
JSON_TYPE = b"application/json"
SSE_TYPE = CONTENT_TYPE.encode()
NATIVE_TYPES = b"content-type: %b\r\naccept: %b\r\n" % (REQUEST_TYPE.encode(), FRAMES_TYPE.encode())
FOREIGN_TYPE = b"content-type: application/json\r\n"
CACHED = b'"cached_tokens"'
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')


def cached_tokens_in(body: bytes) -> int | None:
    """The cached tokens in an engine's last bytes: `"prompt_tokens_details": {"cached_tokens": N}`."""
    found = _CACHED_TOKENS.findall(body)
    return int(found[-1]) if found else None


def peek_into(api: GenerationApi, body: bytes) -> Peek:
    """The fields that the router reads of this API's requests."""
    peek = read_peek(body)
    if not api.is_inner and (conversation := peek_of(api.name, body, peek.model)) is not None:
        peek.messages = conversation.messages  # with what stands beside them there
    return peek


@dataclass(slots=True, eq=False)
class Generation(Request):
    api: GenerationApi = CHAT
    peek: Peek = field(init=False)
    prompt: Prompt = field(init=False)
    model: ServedModel | None = None
    chosen: Member | None = None
    prediction: Prediction | None = None  # of its cached blocks there; None: only guessed, or not looked for
    predicted_at: Moment | None = None  # in the replica's stream
    index_doubt: str | None = None  # why the index may have differed from the chosen replica's cache
    reported_tokens: int | None = None
    attempts: list[Attempt] = field(default_factory=list)
    notes: Notes | None = None
    trace: Any = None  # router.records.tracing.RequestTrace, whose package is an extra; None: not traced
    _tokens_of_model: Tokens = field(init=False)
    _response: ResumableResponse = field(init=False)
    _lost: int = 0
    _moves: int = 0  # away from replicas that fell silent
    _reads_events: bool = False  # whether the client does, so that its stream can end with an error
    _last: bytes = b""  # the last bytes of the events sent to it
    _events: int = 0  # sent to it, where they are numbered
    _whole: bytearray | None = None  # the buffered part of an unstreamed answer
    _held_bytes: int = 0  # of the router's budget: these, and an unfinished frame

    def __post_init__(self) -> None:
        Request.__post_init__(self)  # super() would fail: `slots` makes a new class
        router = self.router
        self.notes = Notes() if router.request_log is not None else None
        if router.tracing is not None:
            self.trace = router.tracing.begin(self.exchange.scope["headers"])

    @property
    def chat(self) -> bool:
        """Tell whether its prompt is a conversation."""
        return self.api.is_chat

    # ---- from the body to a replica

    def serve(self, exchange: Exchange) -> None:
        """Begin with the whole body."""
        self._body = exchange.take_body()
        self.came_s = self.router.now_s()
        if self.notes is not None and self.router.config.log_prompts:
            self.notes.body = bytes(self._body)
        self.router.retry_budget.requests += 1
        try:
            self._make_prompt()
        except ApiError as error:
            self.refuse(error)

    def _make_prompt(self) -> None:
        """Make the prompt here, on a thread or, for a large body, in another process, so that nothing is delayed."""
        body = self._body
        if not is_quick(body):
            self._aside(partial(self._read_apart, body))
            return
        self.peek = peek_into(self.api, body)
        model = self.model = self.router.members.model(self.peek.model)
        salt = self.admitted.cache_salt(self.peek.cache_salt)
        asked = self.chat, body, self.peek, model.lora, salt, model.max_model_len, self.api
        if not model.tokens.is_quick(body):
            self.router.in_thread(lambda: model.tokens.draft(*asked).finish(), len(body), self._made)
            return
        draft = model.tokens.draft(*asked)
        if draft.is_quick:
            self.prompted(draft.finish())
        else:
            self.router.in_thread(draft.finish, len(body), self._made)

    def _made(self, made: "asyncio.Future[Prompt]") -> None:
        """Handle the prompt made by a thread."""
        if made.cancelled() or self.is_over:
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

    async def _read_apart(self, body: bytes) -> None:
        """Have a large body read in another process."""
        salt: str | None = None

        def want(found: Found) -> Make:
            nonlocal salt
            self.peek = Peek(**found.fields)
            salt = self.admitted.cache_salt(self.peek.cache_salt)
            model = self.model = self.router.members.model(self.peek.model)
            return make_for(model, self.chat, salt, self.api)

        made = await self.router.reading.read(body, want)
        self.exchange.aside = None
        assert made is not None and self.model is not None, "it was wanted"
        prompt = prompt_from(made, self.model, self.peek, salt)
        self._body = self._body if made.body is None else made.body  # None: it is unchanged
        self.exchange.hold(len(self._body) + sum(map(len, prompt.packed)))
        self.prompted(prompt)

    def prompted(self, prompt: Prompt) -> None:
        """Place the request, now that its prompt is made."""
        assert self.model is not None, "it was asked to make the prompt"
        self.prompt, self._tokens_of_model = prompt, self.model.tokens
        resumes = self.router.config.resume
        self._response = ResumableResponse(self.chat, prompt, self._body, self.model.tokens, resumes, self.api)
        self.place()

    def _is_ready(self) -> bool:
        model = self.model = self.router.members.model(self.peek.model)  # the replicas may have changed
        if not (self._since_s or self.retries) or not self._is_outdated(model):
            return True
        if self.exchange.response_started:
            raise no_replica("the model has another tokenizer by now")
        self._make_prompt()
        return False

    def _is_outdated(self, model: ServedModel) -> bool:
        """Return whether the prompt's tokens may differ from those of the present replicas."""
        made_otherwise = model.tokens is not self._tokens_of_model or model.lora != self.prompt.lora
        return made_otherwise or (self.prompt.exact and model.tokens.why_not is not None)

    def _choose(self) -> Decision:
        router, model, prompt = self.router, self.model, self.prompt
        assert model is not None, "it is ready"
        started = perf_counter()
        decision, matches = router.decide(model, prompt, self.session, self.tried, self.came_s)
        router.counts.decision_s.observe(perf_counter() - started)
        if self.notes is not None:
            self.notes.decided(next(router.order), decision, model.members, router.feeds)
        if decision.chosen is not None:
            member = self.chosen = router.members.by_name[decision.chosen.name]
            self.prediction, self.predicted_at = None, None
            if not self.peek.skips_cache(self.chat):
                self.prediction = router.placement.predict(prompt, member.candidate, member.block_size, matches)
                self.predicted_at = router.feeds.moment(member.name)
            self.index_doubt = router.doubt(member)
        return decision

    def _send(self, member: Member, decision: Decision) -> bool:
        response, exchange = self._response, self.exchange
        # Before anything is counted, since the client's body may be unusable.
        try:
            if not exchange.response_started:
                response.begin(member)
            elif not response.can_go_on(member, exchange.sent_bytes > 0):
                return False
            if member.native:
                body, dropped, types, path = self._body, TO_NATIVE, NATIVE_TYPES, None
                envelope = response.envelope(decision.priority_s(self.router.now_s()))
            else:
                body, path = response.foreign_body(member)
                dropped, types = TO_FOREIGN if response.continuation is None else TO_READ, FOREIGN_TYPE
                envelope = b""
        except UNREADABLE as error:
            raise unreadable(error) from None
        attempt = self._sent(member, decision, streams=member.native or bool(self.peek.stream))
        self.attempts.append(attempt)
        if self.trace is not None:
            dropped, types = TRACED[dropped], types + self.trace.line()
        request, body = request_to(member, exchange, self.admitted, dropped, types, body, path, envelope)
        attempt.sending = member.upstream.send(request, attempt, body=body)
        if self.prompt.shape is not None and not member.native:
            self._verify(member)
        if self._client_is_full:
            attempt.sending.pause()
        return True

    def _verify(self, member: Member) -> None:
        """Have the shape of the request verified at a replica where it is not; nothing is predicted until then."""
        assert self.model is not None and self.prompt.shape is not None, "the prompt is of this model"
        prompt, verification = self.prompt, self.router.verification
        if self.model.tokens.is_verified_at(prompt, member.server.process):
            return
        if prompt.doubt is NOT_THERE:
            self.prediction = None
        if verification is not None:
            verification.sent(member, self.model, prompt, self._api, self._body)

    def _compare_length(self, attempt: Attempt, body: bytes) -> None:
        """Compare the prompt's length with the engine's, which costs nothing and covers every field of the request."""
        prompt, verification = self.prompt, self.router.verification
        if not prompt.exact or len(prompt.packed) > 1 or self.model is None or verification is None:
            return
        if (found := _PROMPT_TOKENS.findall(body)) and int(found[-1]) != prompt.tokens:
            verification.other_length(attempt.member, self.model.tokens, prompt, int(found[-1]))

    @property
    def _api(self) -> str:
        return self.api.name

    @property
    def model_name(self) -> str:
        return self.peek.model

    @property
    def prompt_field(self) -> Literal["messages", "prompt"]:
        return "messages" if self.chat else "prompt"

    @property
    def session(self) -> str | None:
        session = session_of(self.exchange.scope["headers"], self.peek.prompt_cache_key)
        return None if session is None else session.key

    # ---- from the replica to the client

    def begun(self, attempt: Attempt) -> None:
        exchange = self.exchange
        self._is_answered()
        self.router.answered(attempt)
        if self.api is RESPONSES:  # a replica that goes on with it keeps it in place of this one
            salt = self.admitted.cache_salt(None)
            self.router.responses.add(self._response.response_id, attempt.member.name, salt)
        if attempt.cached_tokens is not None and not self.resumes:
            self.reported_tokens = attempt.cached_tokens
        if exchange.response_started or exchange.disconnected:
            return  # another replica has begun the response
        if attempt.framed:
            if self.peek.stream:  # a whole answer comes at the end, in one piece
                self._start_framed(attempt, SSE_TYPE)
                self._reads_events = True
            return
        streams = (value_of(attempt.headers, b"content-type") or b"").startswith(SSE_TYPE)
        if not streams:
            self._response.continuation = None
            if not self.peek.stream:
                return  # until it is complete, another replica can repeat it
        length = None if self._response.continuation is not None else value_of(attempt.headers, b"content-length")
        self._reads_events = streams and length is None
        self._start(attempt, length)

    def _start(self, attempt: Attempt, length: bytes | None) -> None:
        known = int(length) if length is not None and length.isdigit() else None
        self.exchange.start(attempt.status, self._head(attempt, None, TO_CLIENT), length=known)

    def _start_framed(self, attempt: Attempt, usual_type: bytes) -> None:
        content_type = value_of(attempt.headers, b"x-warmroute-content-type") or usual_type
        self.exchange.start(attempt.status, self._head(attempt, content_type, FROM_FRAMES))

    def _head(self, attempt: Attempt, content_type: bytes | None, dropped: frozenset[bytes]) -> bytes:
        head = lines(attempt.headers, dropped) + attempt.member.name_line
        return head if content_type is None else b"content-type: %b\r\n" % content_type + head

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        exchange = self.exchange
        if not self.first_byte_s:
            self.first_byte_s = self.router.now_s()
        if self.reported_tokens is None and not attempt.framed and not self.resumes and CACHED in body:
            self.reported_tokens = cached_tokens_in(body)
            if self.prompt.shape is not None:
                self._compare_length(attempt, body)
        if self.notes is not None and not attempt.framed:
            self.notes.read(body)
        if self._response.continuation is not None:
            body, lost = self._response.read(body, complete)
            if lost is not None:
                self._lose(attempt, body, lost)
                return
        if complete:
            self._complete(attempt, body)
        elif exchange.response_started:
            if body:
                exchange.send(body)
                self._note_events(body)
            else:
                exchange.flush()
        else:
            self._keep(attempt, body)

    def _note_events(self, body: bytes) -> None:
        """Keep the end of what was sent, and the number of events."""
        api = self.api
        kept = len(api.last_event)
        if api.ending is None:
            self._last = (self._last + body[-kept:])[-kept:]
            return
        self._events += body.count(b"\n\n")  # frames of ours have whole events
        self._last = api.last_event if api.ending.search(body) else body[-kept:]

    def _keep(self, attempt: Attempt, body: bytes) -> None:
        """Buffer a part of an unstreamed answer, which another replica could repeat; send a long one on."""
        if self._whole is None:
            self._whole = bytearray()
        if len(self._whole) + len(body) <= MAX_KEPT_BYTES and self._hold(self._held_bytes + len(body)):
            self._whole += body
            return
        kept = self._taken_whole()
        if attempt.framed:
            self._start_framed(attempt, JSON_TYPE)
        else:
            self._start(attempt, value_of(attempt.headers, b"content-length"))
        self.exchange.send(kept)
        self.exchange.send(body)

    def _taken_whole(self) -> bytes:
        """Take the buffered part of an unstreamed answer, and release its memory."""
        whole, self._whole = bytes(self._whole or b""), None
        self._hold(0)
        return whole

    def holds(self, pending_bytes: int) -> bool:
        return self._hold(pending_bytes + len(self._whole or b""))

    def _hold(self, wanted_bytes: int) -> bool:
        """Set this request's share of the router's budget; return False if that has no room for more."""
        more = wanted_bytes - self._held_bytes
        if more > 0 and not self.router.held.take(more):
            return False
        if more < 0:
            self.router.held.give_back(-more)
        self._held_bytes = wanted_bytes
        return True

    def _lose(self, attempt: Attempt, body: bytes, lost: str) -> None:
        """Treat the replica as lost, since its stream has failed."""
        self.exchange.send(body)
        attempt.cancel()
        self.failed(attempt, Broken(lost))

    def _complete(self, attempt: Attempt, body: bytes) -> None:
        exchange = self.exchange
        # A long refusal is passed on like an answer, and comes to its end here.
        self._end_attempt(attempt, f"it answered {attempt.status}" if attempt.status >= 500 else None)
        if exchange.response_started:
            exchange.finish(body)
            return
        if attempt.framed:
            content_type = value_of(attempt.headers, b"x-warmroute-content-type") or JSON_TYPE
            head = self._head(attempt, content_type, FROM_FRAMES)
        else:
            head = self._head(attempt, None, TO_CLIENT)
        exchange.answer(attempt.status, head, body if self._whole is None else self._taken_whole() + body)

    # ---- what goes wrong

    def refused(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        """Handle a status of 400 or more: try another replica, or pass it on to the client."""
        code = refusal_code(body) if attempt.status in (429, 503) else None
        reason = f"it answered {attempt.status}" + (f" ({code})" if code else "")
        if attempt.status in REFUSALS and code not in RESTING:
            self.router.refused_at_once(attempt)
        if self._may_go_on(attempt, code):
            attempt.cancel()
            self._end_refused(attempt, reason, code)
            self._again(attempt.member)
            return
        if not complete:
            self._pass_on(attempt, body)
            return
        self._end_refused(attempt, reason, code)
        if self.exchange.response_started:  # the client has half an answer already
            self._break_off(f"{attempt.member.name} would not go on with it: {reason}")
        else:
            self.exchange.answer(attempt.status, self._head(attempt, None, TO_CLIENT), body)

    def _end_refused(self, attempt: Attempt, reason: str, code: str | int | None) -> None:
        """End a refused attempt; being full or draining is no fault of the replica, nor is a client's error."""
        if code in RESTING:
            self.router.rests(attempt)
        fault = attempt.status >= 500 and code not in RESTING
        self._end_attempt(attempt, reason if fault else None)

    def _may_go_on(self, attempt: Attempt, code: str | int | None) -> bool:
        if attempt.status not in REFUSALS or self._lost >= MAX_LOST or not self._others(attempt):
            return False
        if self.exchange.response_started and attempt.status < 500 and code is None:
            return False
        # A resting or full replica has not begun; any other refusal may be caused by the request itself.
        if code in RESTING or code == "queue_full":
            return True
        self._lost += attempt.status >= 500
        return self.router.retry_budget.take(self.router.now_s())

    def _pass_on(self, attempt: Attempt, body: bytes) -> None:
        """Stream a long refusal to the client like an answer."""
        self._response.continuation = None
        if self.exchange.response_started:
            attempt.cancel()
            self._end_attempt(attempt)
            self._break_off(f"{attempt.member.name} would not go on with it")
            return
        length = value_of(attempt.headers, b"content-length")
        known = int(length) if length is not None and length.isdigit() else None
        self.exchange.start(attempt.status, self._head(attempt, None, TO_CLIENT), length=known)
        self.exchange.send(body)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        """Continue at another replica after a loss, from the start or from where the answer was cut."""
        exchange = self.exchange
        self._broke(attempt, broken)
        self._response.keep(attempt)
        moved = broken.silent and not broken.refused
        if moved:
            self._moves += 1
        elif not broken.refused:
            self._lost += 1
        if broken.late:
            self.unfit = self.unfit | {attempt.member.name}
        if self._reads_events and self._last == self.api.last_event:
            exchange.finish()
            return
        self._taken_whole()  # another replica repeats it
        why_not = self._response.settle(attempt, exchange.sent_bytes > 0) if exchange.response_started else None
        if why_not is None and exchange.response_started and not self._reads_events:
            why_not = "the client has a part of a whole answer already"
        if why_not is not None:
            self._break_off(f"{attempt.member.name}: {broken}; {why_not}")
        elif self._ends_here(attempt.member):
            pass
        elif self._lost >= MAX_LOST:
            why = f"{self._lost} replicas in a row were lost while they answered it"
            self.give_up(no_replica(f"no replica could answer: {why}"))
        else:
            if attempt.framed or exchange.response_started:
                self.resumes += 1
            if moved and not attempt.member.server.suspicion:
                self.retries += 1
                self.place()  # it is heard again, by other connections
            elif self._lost == MAX_LOST - 1 and not (moved or broken.refused):
                asyncio.get_running_loop().call_later(DYING_S, exchange.guard, self._again, attempt.member)
            else:
                self._again(attempt.member)

    def may_move(self, attempt: Attempt, members: Sequence[Member]) -> bool:
        """Return whether the request could continue at one of these replicas instead of waiting for its own."""
        if self._moves >= MOST_MOVES:
            return False
        started, own = self.exchange.response_started, attempt.member
        longest = own.candidate.max_model_len
        for member in members:
            one = member.candidate
            if member is own:
                able = one.unavailable is None
            else:
                able = can_take(one, self._tokens, self.tried) and self.peek.model in member.models
                # The generated tokens are part of the prompt there.
                able = able and (not started or one.max_model_len is None or one.max_model_len >= (longest or 0))
            if able and (not started or (self._reads_events and self._response.may_move(attempt, member))):
                return True
        return False

    def _ends_here(self, member: Member) -> bool:
        """Finish the stream without a replica if all its tokens were generated; return whether that was so."""
        ending = self._response.ending(member) if self.exchange.response_started else None
        if ending is None:
            return False
        self.exchange.finish(ending)
        return True

    def give_up(self, error: ApiError) -> None:
        if self.exchange.response_started:
            self._break_off(error.message)
        else:
            self.refuse(error)

    def _break_off(self, why: str) -> None:
        """End half an answer: a stream by an error event, anything else by cutting the connection."""
        self.why = why
        exchange = self.exchange
        if self._reads_events:
            error = ApiError(502, f"the answer broke off, and no other replica could continue it: {why}")
            error.type, error.code = "server_error", "broken_stream"
            end_of_half_an_event = b"" if self._last.endswith(b"\n\n") or not self._last else b"\n\n"
            exchange.send(end_of_half_an_event + self.api.error_event(error, self._events))
            exchange.finish()
        else:
            exchange.cut()

    def _over(self, exchange: Exchange) -> None:
        if self._held_bytes:
            self._taken_whole()
        Request._over(self, exchange)
        # Attempts refer to the request: a cycle, which would keep the body until it is collected.
        self.attempts, self.notes = [], None

    def summary(self) -> RequestSummary:
        decision = self.decision
        return RequestSummary(
            exchange=self.exchange,
            admitted=self.admitted,
            arrived_s=self.arrived_s,
            ended_s=self.ended_s,
            first_byte_s=self.first_byte_s,
            waited_s=self.waited_s,
            retries=self.retries,
            resumes=self.resumes,
            why=self.why,
            chat=self.chat,
            model=self.model,
            generation=None
            if decision is None
            else GenerationSummary(
                self.peek,
                self.prompt,
                decision,
                self.chosen,
                self.prediction,
                self.reported_tokens,
                exactness(self.prompt, self.prediction, self.index_doubt),
                self.predicted_at,
            ),
            attempts=self.attempts,
            notes=self.notes,
            trace=self.trace,
        )
