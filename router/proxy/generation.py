"""One generation request: from its prompt to a replica, from there to its client, to another replica if one fails."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from api.generation_apis import RESPONSES
from api.native import FRAMES_TYPE, REQUEST_TYPE
from api.responses import CONTENT_TYPE
from router.members.broken import Broken
from router.members.members import Member
from router.placement.decision import Decision
from router.placement.eligibility import can_take
from router.prompts.prompt import UNREADABLE, Prompt, unreadable
from router.proxy.aborts import ABORTED, is_aborted, is_servers_error
from router.proxy.attempt import Attempt
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
    request_to,
    value_of,
)
from router.proxy.kept_answer import KeptAnswer, SentEvents
from router.proxy.prompted_request import PromptedRequest
from router.proxy.request import Request
from router.proxy.responses import new_response_id
from router.proxy.resumable_response import ResumableResponse
from router.proxy.retries import MOST_MOVES, Row

JSON_TYPE = b"application/json"
SSE_TYPE = CONTENT_TYPE.encode()
NATIVE_TYPES = b"content-type: %b\r\naccept: %b\r\n" % (REQUEST_TYPE.encode(), FRAMES_TYPE.encode())


@dataclass(slots=True, eq=False)
class Generation(PromptedRequest):
    _response: ResumableResponse = field(init=False)
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
        is_ours = member.profile.takes_envelope
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
        attempt = self._sent(member, decision, streams=streams, envelope=is_ours)
        attempt.takes_frames = is_ours
        if self.trace is not None:
            passed, types = TRACED[passed], types + self.trace.line()
        request, body = request_to(member, exchange, self.admitted, passed, types, body, path, envelope)
        resend = self._may_resend(member, decision)
        attempt.sending = member.upstream.send(request, attempt, body=body, resend=resend)
        if self.prompt.shape is not None and not is_ours:
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
        self._observe(attempt, body)
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
            self._start_answer(attempt, length_of(attempt.headers))
        self.exchange.send(kept)
        self.exchange.send(body)

    def holds(self, pending_bytes: int) -> bool:
        if self._kept is None:
            self._kept = KeptAnswer(self.router.held)
        return self._kept.hold_beside(pending_bytes)

    def _complete(self, attempt: Attempt, body: bytes) -> None:
        exchange = self.exchange
        if self._events is None and not attempt.framed and attempt.status < 400:
            if self._kept is not None:
                body = self._kept.take() + body
            if is_aborted(self.api.name, body, attempt.member.profile):
                self._lose(attempt, b"", Broken(ABORTED))
                return
        # A long refusal is passed on like an answer, and comes to its end here.
        self._end_attempt(attempt)
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
        PromptedRequest._pass_on(self, attempt, body, complete)  # super() would fail: `slots` makes a new class

    def _why_not_again(self, attempt: Attempt, row: Row) -> str | None:  # noqa: ARG002
        self._response.keep(attempt)
        exchange = self.exchange
        if not exchange.response_started:
            return None
        why_not = self._response.settle(attempt, exchange.sent_bytes > 0)
        if why_not is None and self._events is None:
            return "the client has a part of a whole answer already"
        return why_not

    def _ending(self, member: Member) -> bytes | None:
        return self._response.ending(member) if self.exchange.response_started else None

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
