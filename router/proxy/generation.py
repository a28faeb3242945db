"""One generation request: from its prompt to a replica, from there to its client, to another replica if one fails."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from api.errors import ApiError
from api.generation_apis import RESPONSES
from api.native import FRAMES_TYPE, REQUEST_TYPE
from api.responses import CONTENT_TYPE
from router.members.broken import Broken
from router.members.members import Member, no_replica
from router.placement.decision import Decision
from router.placement.eligibility import can_take
from router.prompts.prompt import UNREADABLE, Prompt, unreadable
from router.proxy.aborts import ABORTED, is_aborted, is_servers_error
from router.proxy.attempt import RESTING, Attempt, refusal_code
from router.proxy.exchange import Exchange
from router.proxy.handover import Beginning
from router.proxy.headers import (
    FROM_FRAMES,
    JSON_LINE,
    TO_CLIENT,
    TO_READ,
    TO_REPLICA,
    TRACED,
    lines,
    request_to,
    value_of,
)
from router.proxy.kept_answer import KeptAnswer, SentEvents
from router.proxy.prompted_request import PromptedRequest
from router.proxy.request import Request
from router.proxy.responses import new_response_id
from router.proxy.resumable_response import ResumableResponse

MAX_LOST = 3  # replicas that one request may lose before it is given up
DYING_S = 0.5  # before the last try: replicas of a machine that dies do not all end at the same moment
MOST_MOVES = 3  # then it waits for the silent one: on a stalled machine, all seem silent
REFUSALS = frozenset({429, 500, 502, 503, 504})  # that another replica may not give
JSON_TYPE = b"application/json"
SSE_TYPE = CONTENT_TYPE.encode()
NATIVE_TYPES = b"content-type: %b\r\naccept: %b\r\n" % (REQUEST_TYPE.encode(), FRAMES_TYPE.encode())


@dataclass(slots=True, eq=False)
class Generation(PromptedRequest):
    _response: ResumableResponse = field(init=False)
    _lost: int = 0
    _moves: int = 0  # away from replicas that fell silent
    _events: SentEvents | None = None  # for a client that reads events, so that its stream can end with an error
    _kept: KeptAnswer | None = None
    _beginning: Beginning | None = None  # of an answer that may turn out to be an error

    def __post_init__(self) -> None:
        Request.__post_init__(self)  # super() would fail: `slots` makes a new class
        self._take_notes()

    # ---- to a replica

    def prompted(self, prompt: Prompt) -> None:
        assert self.model is not None, "it was asked to make the prompt"
        self.prompt, tokens = prompt, self.model.tokens
        self._tokens_of_model = tokens
        self._response = ResumableResponse(self.api, prompt, self._body, tokens, self.router.config.resume)
        self.place_in_turn()

    def _send(self, member: Member, decision: Decision) -> bool:
        response, exchange = self._response, self.exchange
        self._beginning = None
        # Before anything is counted, since the client's body may be unusable.
        try:
            if not exchange.response_started or response.is_unsaid(exchange.sent_bytes):
                response.begin(member)
            elif not response.can_go_on(member, exchange.sent_bytes > 0):
                return False
            if member.native:
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
        streams = member.native or bool(self.peek.stream)
        attempt = self._sent(member, decision, streams=streams, envelope=member.native)
        attempt.takes_frames = member.native
        self.attempts.append(attempt)
        if self.trace is not None:
            passed, types = TRACED[passed], types + self.trace.line()
        request, body = request_to(member, exchange, self.admitted, passed, types, body, path, envelope)
        resend = self._may_resend(member, decision)
        attempt.sending = member.upstream.send(request, attempt, body=body, resend=resend)
        if self.prompt.shape is not None and not member.native:
            self.hit.verify(self.router, self.model, self.prompt, self.api.name, self._body)
        if self._client_is_full:
            attempt.sending.pause()
        return True

    def _new_id(self, member: Member) -> str:
        if self.api is not RESPONSES:
            return self.api.new_id()
        return new_response_id(self.admitted.cache_salt(None), member.name, self.peek.model)

    # ---- from the replica to the client

    def begun(self, attempt: Attempt) -> None:
        exchange = self.exchange
        self._is_answered()
        self.router.answered(attempt)
        if attempt.cached_tokens is not None and not self.resumes:
            self.hit.reported_tokens = attempt.cached_tokens
            if self.prefill is not None and self.decision is not None:
                self.prefill.found(self.decision, attempt.cached_tokens)
        if exchange.response_started or exchange.disconnected:
            return  # another replica has begun the response
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
        length = None if self._response.continuation is not None else value_of(attempt.headers, b"content-length")
        if streams and length is None:
            self._events = SentEvents(self.api)
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
        if body and not attempt.begun_s:
            self.router.computed(attempt)
        if self._beginning is not None:
            held = self._begin_fetched(attempt, self._beginning, body, complete)
            if held is None:
                return
            body = held
        self._observe(attempt, body)
        if self._response.continuation is not None:
            body, lost = self._response.read(body, complete)
            if attempt.report is not None:
                attempt.report.counted = self._response.continuation.new_tokens or attempt.report.counted
            if lost is not None:
                self._lose(attempt, body, lost)
                return
        elif self._events is not None and not attempt.framed:
            if not exchange.sent_bytes and is_servers_error(body):
                self._lose(attempt, b"", "its stream is an error")
                return
            if (b'"abort"' in body or not self._events.is_between) and (
                before := self._events.before_abort(body)
            ) is not None:
                self._lose(attempt, before, ABORTED)
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
            self._start(attempt, value_of(attempt.headers, b"content-length"))
        self.exchange.send(kept)
        self.exchange.send(body)

    def holds(self, pending_bytes: int) -> bool:
        if self._kept is None:
            self._kept = KeptAnswer(self.router.held)
        return self._kept.hold_beside(pending_bytes)

    def _lose(self, attempt: Attempt, body: bytes, lost: str) -> None:
        """Treat the replica as lost, since its stream has failed."""
        self.exchange.send(body)
        if body and self._events is not None:
            self._events.note(body)
        attempt.cancel()
        attempt.member.health.probe_soon(self.router.now_s())  # it may be asleep, or end
        self.failed(attempt, Broken(lost))

    def _complete(self, attempt: Attempt, body: bytes) -> None:
        exchange = self.exchange
        if self._events is None and not attempt.framed and attempt.status < 400:
            if self._kept is not None:
                body = self._kept.take() + body
            if is_aborted(self.api.name, body, attempt.member.spec.engine):
                self._lose(attempt, b"", ABORTED)
                return
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
        exchange.answer(attempt.status, head, body if self._kept is None else self._kept.take() + body)

    # ---- what goes wrong

    def refused(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        """Handle a status of 400 or more: try another replica, or pass it on to the client."""
        if self._has_not_fetched(attempt):
            self._compute_here(attempt)
            return
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
        if self._events is not None and self._events.is_complete:
            exchange.finish()
            return
        if self._kept is not None:
            self._kept.take()  # another replica repeats it
        why_not = self._response.settle(attempt, exchange.sent_bytes > 0) if exchange.response_started else None
        if why_not is None and exchange.response_started and self._events is None:
            why_not = "the client has a part of a whole answer already"
        if why_not is not None:
            self._break_off(f"{attempt.member.name}: {broken}; {why_not}")
        elif self._ends_here(attempt.member):
            pass
        elif self._lost >= MAX_LOST:
            why = f"{self._lost} replicas in a row were lost while they answered it"
            self.give_up(no_replica(f"no replica could answer: {why}"))
        else:
            if attempt.framed or exchange.sent_bytes:
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
        exchange, own = self.exchange, attempt.member
        started = exchange.response_started and not self._response.is_unsaid(exchange.sent_bytes)
        longest = own.candidate.max_model_len
        for member in members:
            one = member.candidate
            if member is own:
                able = one.unavailable is None
            else:
                able = can_take(one, self._tokens, self.tried) and member.serves(self.peek.model)
                # The generated tokens are part of the prompt there.
                able = able and (not started or one.max_model_len is None or one.max_model_len >= (longest or 0))
            if able and (not started or (self._events is not None and self._response.may_move(attempt, member))):
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
        if self._events is not None:
            error = ApiError(502, f"the answer broke off, and no other replica could continue it: {why}")
            error.type, error.code = "server_error", "broken_stream"
            exchange.send(self._events.error_event(error))
            exchange.finish()
        else:
            exchange.cut()

    def _over(self, exchange: Exchange) -> None:
        if self._kept is not None:
            self._kept.take()
        PromptedRequest._over(self, exchange)
