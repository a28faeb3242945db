"""One generation request: from its body to a replica, from there to its client, and to another replica if one fails.

Everything here is called: by the client's exchange, by attempts, by the router when there is room. Nothing waits.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_128_hexdigest

from api.errors import ApiError
from api.native import FRAMES_TYPE, REQUEST_TYPE
from api.sse import CONTENT_TYPE as SSE_TYPE
from api.sse import DONE, event
from router.accounting import CACHED, cached_tokens_in
from router.admission import Admitted
from router.answer import Answer
from router.attempt import Attempt, refusal_code
from router.exchange import Exchange
from router.headers import (
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
from router.members import Member, ServedModel, no_replica
from router.noted import Noted
from router.placement.decision import Decision
from router.placement.eligibility import can_take
from router.placement.index import Matches
from router.placement.placement import APPROXIMATE, Placement, Prediction
from router.prompt import UNREADABLE, Peek, Prompt, read_peek, unreadable
from router.reading.client import is_quick
from router.upstream import Broken

if TYPE_CHECKING:
    from router.core import Router

SESSION_HEADER = b"x-session-id"
MAX_SESSION = 256  # characters; decisions keep it
MAX_LOST = 3  # replicas that one request may take down with it before it is given up
MOST_MOVES = 3  # then it waits for the one that is silent: on a machine that stands still, all seem to be
REFUSALS = frozenset({429, 500, 502, 503, 504})  # that another replica may not give
RESTING = ("draining", "loading")  # codes of replicas that take nothing new
MAX_KEPT_BYTES = 4 * 1024 * 1024  # of a whole answer, so that another replica may give it anew
JSON_TYPE = b"application/json"
NATIVE_TYPES = b"content-type: %b\r\naccept: %b\r\n" % (REQUEST_TYPE.encode(), FRAMES_TYPE.encode())
FOREIGN_TYPE = b"content-type: application/json\r\n"


class Routing:
    __slots__ = (
        "_answer",
        "_attempt",
        "_body",
        "_client_is_full",
        "_held_bytes",
        "_last",
        "_lost",
        "_moves",
        "_reads_events",
        "_router",
        "_tokens",
        "_whole",
        "admitted",
        "again_s",
        "arrived_s",
        "block_size",
        "came_s",
        "chat",
        "chosen",
        "decision",
        "exchange",
        "first_byte_s",
        "fruitless",
        "is_over",
        "model",
        "noted",
        "peek",
        "prediction",
        "prompt",
        "queued_s",
        "reported_tokens",
        "resumes",
        "retries",
        "since_s",
        "trace",
        "tried",
        "unfit",
        "waited_s",
        "waits_until_s",
        "why",
    )

    def __init__(self, router: "Router", exchange: Exchange, admitted: Admitted, chat: bool, now_s: float) -> None:
        self.exchange = exchange
        self.admitted = admitted
        self.chat = chat
        self.arrived_s = now_s
        self.first_byte_s = 0.0
        self.waited_s = 0.0
        self.queued_s = 0.0  # when it began to wait for room; 0: it does not
        self.since_s = 0.0  # when it did so first
        self.waits_until_s = 0.0  # 0: it has not waited since a replica answered
        self.again_s = 0.0  # not to be tried before
        self.fruitless = 0  # tries, since a replica answered
        self.peek: Peek
        self.prompt: Prompt
        self.model: ServedModel | None = None
        self.decision: Decision | None = None
        self.chosen: Member | None = None
        self.block_size = APPROXIMATE  # in which the prediction counts
        self.prediction: Prediction | None = None  # None: only guessed
        self.reported_tokens: int | None = None
        self.retries = 0
        self.resumes = 0
        self.is_over = False
        self.why = ""  # it ended without an answer
        self.noted = Noted() if router.request_log is not None else None
        self.trace = router.tracing.begin(exchange.scope["headers"]) if router.tracing is not None else None
        self._router = router
        self._body = b""
        self.came_s = now_s
        self._attempt: Attempt | None = None
        self._answer: Answer
        self.tried: frozenset[str] = frozenset()
        self.unfit: frozenset[str] = frozenset()  # of these, those that cannot go on with it, or took too long
        self._lost = 0
        self._moves = 0  # away from replicas that fell silent
        self._client_is_full = False
        self._reads_events = False  # the client, so that its answer can end in words
        self._last = b""  # the end of what it was sent of them
        self._whole: bytearray | None = None  # the parts of a whole answer, kept until they can be counted
        self._held_bytes = 0  # of the router's budget: these, and what has come of a frame
        exchange.answerer = self
        exchange.on_end = self._over

    # ---- from the body to a replica

    def serve(self, exchange: Exchange) -> None:
        """The whole body is there."""
        self._body = exchange.take_body()
        self.came_s = self._router.now_s()
        if self.noted is not None and self._router.config.log_prompts:
            self.noted.body = bytes(self._body)
        self._router.retry_budget.requests += 1
        try:
            self._make_prompt()
        except ApiError as error:
            self.refuse(error)

    def _make_prompt(self) -> None:
        if not is_quick(self._body):
            self._router.read_apart(self, self._body)
            return
        self.peek = read_peek(self._body)
        self.model = self._router.members.model(self.peek.model)
        self._router.make_prompt(self, self.model, self._body, self.admitted.cache_salt(self.peek.cache_salt))

    def found(self, peek: Peek) -> ServedModel:
        """The fields of a large body, whose prompt is yet to be made; ApiError: nobody serves its model."""
        self.peek, self.model = peek, self._router.members.model(peek.model)
        return self.model

    def made(self, body: bytes | None, prompt: Prompt) -> None:
        """The prompt of a large body, and the body itself where it had to be changed."""
        self._body = self._body if body is None else body
        self.exchange.hold(len(self._body) + sum(map(len, prompt.packed)))
        self.prompted(prompt)

    def prompted(self, prompt: Prompt) -> None:
        """The prompt's tokens are known."""
        assert self.model is not None, "it was asked to make the prompt"
        self.prompt, self._tokens = prompt, self.model.tokens
        self._answer = Answer(self.chat, prompt, self._body, self.model.tokens, self._router.config.resume)
        self.place()

    def place(self) -> None:
        """Choose a replica, or wait until one has room."""
        try:
            while not self.is_over:
                self.model = self._router.members.model(self.peek.model)  # there may be other replicas by now
                if (self.since_s or self.retries) and self._is_outdated(self.model):
                    if self.exchange.response_started:
                        raise no_replica("the model has another tokenizer by now")
                    self._make_prompt()
                    return
                member = self._router.decide(self, self.model, self.tried)
                if member is None:  # it waits, and the router calls again
                    return
                if self._send(member):
                    return
                self.tried, self.unfit = self.tried | {member.name}, self.unfit | {member.name}
        except ApiError as error:
            self.give_up(error)
        except UNREADABLE as error:
            self.give_up(unreadable(error))

    def _is_outdated(self, model: ServedModel) -> bool:
        """Whether the prompt's tokens may not be those of the replicas that are there now."""
        made_otherwise = model.tokens is not self._tokens or model.lora != self.prompt.lora
        return made_otherwise or (self.prompt.exact and model.tokens.why_not is not None)

    def predict(self, member: Member, matches: Mapping[int, Matches]) -> None:
        """How many blocks the chosen replica will find in its cache."""
        self.chosen = member
        self.block_size = member.block_size if self.prompt.exact else APPROXIMATE
        self.prediction = Placement.predict(self.prompt, member.candidate, member.block_size, matches)

    def _send(self, member: Member) -> bool:
        """False: it cannot go on with what the client has begun to read."""
        answer, exchange = self._answer, self.exchange
        if not exchange.response_started:
            answer.begin(member)
        elif not answer.can_go_on(member, exchange.sent_bytes > 0):
            return False
        # Before anything is counted: the client's body may not be fit for it.
        if member.native:
            body, dropped, types, path = self._body, TO_NATIVE, NATIVE_TYPES, None
            envelope = answer.envelope(self.priority_s)
        else:
            body, path = answer.foreign_body(member)
            dropped, types = TO_FOREIGN if answer.continuation is None else TO_READ, FOREIGN_TYPE
            envelope = b""
        attempt = self._attempt = self._router.generation(self, member)
        if self.trace is not None:
            dropped, types = TRACED[dropped], types + self.trace.line(attempt)
        request, body = request_to(member, exchange, self.admitted, dropped, types, body, path, envelope)
        attempt.sending = member.upstream.send(request, attempt, body=body)
        if self._client_is_full:
            attempt.sending.pause()
        return True

    @property
    def priority_s(self) -> float:
        """By how much later than now it counts as having come."""
        assert self.decision is not None
        return self.decision.priority_s(self._router.now_s())

    @property
    def model_name(self) -> str | None:
        return self.peek.model

    @property
    def session(self) -> str | None:
        """What keeps requests together, where the policy wants that; a digest of it where it is long."""
        header = value_of(self.exchange.scope["headers"], SESSION_HEADER)
        given = self.peek.prompt_cache_key if header is None else header.decode("latin-1")
        if given is None or len(given) <= MAX_SESSION:
            return given
        return xxh3_128_hexdigest(given.encode("utf-8", "replace"))

    # ---- from the replica to the client

    def begun(self, attempt: Attempt) -> None:
        exchange = self.exchange
        self.waits_until_s, self.fruitless = 0.0, 0
        self._router.answered(attempt)
        if attempt.cached_tokens is not None and not self.resumes:
            self.reported_tokens = attempt.cached_tokens
        if exchange.response_started or exchange.disconnected:
            return  # it goes on with what another one began
        if attempt.framed:
            if self.peek.stream:  # a whole answer comes at the end, in one piece
                self._start_framed(attempt, SSE_TYPE.encode())
                self._reads_events = True
            return
        streams = (value_of(attempt.headers, b"content-type") or b"").startswith(SSE_TYPE.encode())
        if not streams:
            self._answer.continuation = None
            if not self.peek.stream:
                return  # until it is complete, another replica can give it
        length = None if self._answer.continuation is not None else value_of(attempt.headers, b"content-length")
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
            self.first_byte_s = self._router.now_s()
        if self.reported_tokens is None and not attempt.framed and not self.resumes and CACHED in body:
            self.reported_tokens = cached_tokens_in(body)
        if self.noted is not None and not attempt.framed:
            self.noted.read(body)
        if self._answer.continuation is not None:
            body, lost = self._answer.read(body, complete)
            if lost is not None:
                self._lose(attempt, body, lost)
                return
        if complete:
            self._complete(attempt, body)
        elif exchange.response_started:
            if body:
                exchange.send(body)
                self._last = (self._last + body[-len(DONE) :])[-len(DONE) :]
            else:
                exchange.flush()
        else:
            self._keep(attempt, body)

    def _keep(self, attempt: Attempt, body: bytes) -> None:
        """Keep a part of a whole answer, which another replica may give anew; one that grows too long goes on now."""
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
        """What is kept of a whole answer, and no longer from now on."""
        whole, self._whole = bytes(self._whole or b""), None
        self._hold(0)
        return whole

    def holds(self, pending_bytes: int) -> bool:
        return self._hold(pending_bytes + len(self._whole or b""))

    def _hold(self, wanted_bytes: int) -> bool:
        """Have so much of the router's budget; False: it has no room for more."""
        more = wanted_bytes - self._held_bytes
        if more > 0 and not self._router.held.take(more):
            return False
        if more < 0:
            self._router.held.give_back(-more)
        self._held_bytes = wanted_bytes
        return True

    def _lose(self, attempt: Attempt, body: bytes, lost: str) -> None:
        """The replica has said itself that it cannot go on."""
        self.exchange.send(body)
        attempt.cancel()
        self.failed(attempt, Broken(lost))

    def _complete(self, attempt: Attempt, body: bytes) -> None:
        exchange = self.exchange
        # A long refusal is passed on like an answer, and comes to its end here.
        self._router.attempt_over(attempt, f"it answered {attempt.status}" if attempt.status >= 500 else None)
        self._attempt = None
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
        """Status 400 or more: the client's fault, or one that another replica may not have."""
        code = refusal_code(body) if attempt.status in (429, 503) else None
        reason = f"it answered {attempt.status}" + (f" ({code})" if code else "")
        if attempt.status in REFUSALS and code not in RESTING:
            self._router.refused_at_once(attempt)
        if self._may_go_on(attempt, code):
            attempt.cancel()
            self._end_attempt(attempt, reason, code)
            self._again(attempt.member)
            return
        if not complete:
            self._pass_on(attempt, body)
            return
        self._end_attempt(attempt, reason, code)
        if self.exchange.response_started:  # the client has half an answer already
            self._break_off(f"{attempt.member.name} would not go on with it: {reason}")
        else:
            self.exchange.answer(attempt.status, self._head(attempt, None, TO_CLIENT), body)

    def _end_attempt(self, attempt: Attempt, reason: str, code: str | int | None) -> None:
        """One that was refused: full and draining are no faults, nor is what the client did wrong."""
        if code in RESTING:
            self._router.rests(attempt)
        fault = attempt.status >= 500 and code not in RESTING
        self._router.attempt_over(attempt, reason if fault else None)
        self._attempt = None

    def _may_go_on(self, attempt: Attempt, code: str | int | None) -> bool:
        if attempt.status not in REFUSALS or self._lost >= MAX_LOST:
            return False
        tokens = self.prompt.tokens if self.prompt.exact else 0
        others = self._router.others(self.model, self.tried | {attempt.member.name}, tokens)
        if not others or (self.exchange.response_started and attempt.status < 500 and code is None):
            return False
        # One that rests or is full has not begun with it; any other refusal may be this request's own doing.
        if code in RESTING or code == "queue_full":
            return True
        self._lost += attempt.status >= 500
        return self._router.retry_budget.take(self._router.now_s())

    def _pass_on(self, attempt: Attempt, body: bytes) -> None:
        """A long refusal is streamed like an answer."""
        self._answer.continuation = None
        if self.exchange.response_started:
            attempt.cancel()
            self._router.attempt_over(attempt)
            self._break_off(f"{attempt.member.name} would not go on with it")
            return
        length = value_of(attempt.headers, b"content-length")
        known = int(length) if length is not None and length.isdigit() else None
        self.exchange.start(attempt.status, self._head(attempt, None, TO_CLIENT), length=known)
        self.exchange.send(body)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        """The replica is lost to this request: the next one, from the start or from where this one was cut."""
        exchange = self.exchange
        self._router.attempt_over(attempt, broken.fault, refused=broken.refused, silent=broken.silent)
        self._answer.keep(attempt)
        self._attempt = None
        moved = broken.silent and not broken.refused
        if moved:
            self._moves += 1
        elif not broken.refused:
            self._lost += 1
        if broken.late:
            self.unfit = self.unfit | {attempt.member.name}
        if self._reads_events and self._last == DONE:
            exchange.finish()
            return
        self._taken_whole()  # it will be given anew
        why_not = self._answer.settle(attempt, exchange.sent_bytes > 0) if exchange.response_started else None
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
            if moved and not attempt.member.suspicion:
                self.retries += 1
                self.place()  # it is heard again, by other connections
            else:
                self._again(attempt.member)

    def may_move(self, attempt: Attempt, members: Sequence[Member]) -> bool:
        """Whether it could go on at one of these replicas, so that it need not wait for its own."""
        if self._moves >= MOST_MOVES or self.model is None:
            return False
        tokens = self.prompt.tokens if self.prompt.exact else 0
        started, own = self.exchange.response_started, attempt.member
        longest = own.candidate.max_model_len
        for member in members:
            one = member.candidate
            if member is own:
                able = one.unavailable is None
            else:
                able = can_take(one, tokens, self.tried) and self.peek.model in member.models
                # What was generated is part of the prompt there.
                able = able and (not started or one.max_model_len is None or one.max_model_len >= (longest or 0))
            if able and (not started or (self._reads_events and self._answer.may_move(attempt, member))):
                return True
        return False

    def _ends_here(self, member: Member) -> bool:
        """Whether the rest of the stream could be said without a replica."""
        ending = self._answer.ending(member) if self.exchange.response_started else None
        if ending is None:
            return False
        self.exchange.finish(ending)
        return True

    def _again(self, member: Member) -> None:
        self.retries += 1
        self.tried = self.tried | {member.name}
        self.place()

    def give_up(self, error: ApiError) -> None:
        if self.exchange.response_started:
            self._break_off(error.message)
        else:
            self.refuse(error)

    def _break_off(self, why: str) -> None:
        """There is half an answer. A stream can say so; of anything else the client sees that it is not complete."""
        self.why = why
        exchange = self.exchange
        if self._reads_events:
            error = ApiError(502, f"the answer broke off, and no other replica could go on with it: {why}")
            error.type, error.code = "server_error", "broken_stream"
            end_of_half_an_event = b"" if self._last.endswith(b"\n\n") or not self._last else b"\n\n"
            exchange.send(end_of_half_an_event + event(error.body()) + DONE)
            exchange.finish()
        else:
            exchange.cut()

    def refuse(self, error: ApiError) -> None:
        self.why = error.message
        self._router.counts.refused[error.code or str(error.status)] += 1
        if not self.is_over:
            self.exchange.refuse(error)

    # ---- what the client does

    def client_left(self) -> None:
        """Its attempt ends with it, in `_over`."""

    def client_full(self) -> None:
        self._client_is_full = True
        if self._attempt is not None and self._attempt.sending is not None:
            self._attempt.sending.pause()

    def client_ready(self) -> None:
        self._client_is_full = False
        if self._attempt is not None and self._attempt.sending is not None:
            self._attempt.sending.resume()

    def _over(self, exchange: Exchange) -> None:  # noqa: ARG002
        self.is_over = True
        if self._held_bytes:
            self._taken_whole()
        if self._attempt is not None:  # it ended before its attempt did
            self._attempt.cancel()
            self._router.attempt_over(self._attempt)
            self._attempt = None
        self._body = b""
        self._router.over(self)
