"""The answer in progress: it listens to the attempts, passes on what they bring, and knows what its client has.

A generation goes on by token ids: of a stream from our own replicas only those are kept; a foreign engine's stream is
parsed on its way (`resume`). Of the Messages and Responses APIs of foreign engines, another replica repeats the stream
(`repetition`). A whole answer is kept until it is complete.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from api.errors import ApiError
from api.generation_apis import APIS, RESPONSES
from api.native import KvSource, Native, envelope, pack_ids, unpack_ids
from api.responses import CONTENT_TYPE
from router.members.broken import Broken
from router.members.budget import Budget
from router.members.members import Member, ServedModel
from router.placement.cost import Neighbour, can_take
from router.prompts.prompt import Prompt, salted_for
from router.proxy.attempt import BODY, MARK, Attempt, Report
from router.proxy.events import ABORTED, LONGEST_END, SentEvents, is_aborted, is_servers_error
from router.proxy.exchange import Exchange
from router.proxy.flow import Flow, RequestType
from router.proxy.headers import FROM_FRAMES, TO_CLIENT, length_of, lines, value_of
from router.proxy.predicted_hit import PredictedHit
from router.proxy.prefill import Beginning, Prefill
from router.proxy.repetition import FIELD, Repetition, without_tokens
from router.proxy.resume import COMPLETIONS_PATH, Continuation, why_alone, with_ids
from router.proxy.retries import NOT_REACHED, loss, refusal
from router.proxy.services import Services

JSON_TYPE = b"application/json"
SSE_TYPE = CONTENT_TYPE.encode()
MAX_KEPT_BYTES = 4 * 1024 * 1024
HAS_BEGUN = "its answer has begun"


@dataclass(slots=True, eq=False)
class Answer:
    """The answer to one request. For each replica: `goes_to`, then its body, then what its attempt tells."""

    exchange: Exchange
    flow: Flow
    router: Services
    type: RequestType
    hit: PredictedHit
    # The request sets these when it has read the body:
    prompt: Prompt | None = None  # None: it is not read
    model: ServedModel | None = None
    model_name: str | None = None
    body: bytes = b""
    streams: bool = False
    may_repeat: bool = False  # another replica could answer it anew
    may_resume: bool = False
    # These change as the answer goes on:
    attempt: Attempt | None = None  # the one under way
    prefill: Prefill | None = None
    first_byte_s: float = 0.0
    report: Report | None = None  # the figures of the engine that answers, where it tells them
    is_background: bool = False  # whoever asked for the response was not told what was generated
    reader: Continuation | Repetition | None = None  # parses a stream on its way
    events: SentEvents | None = None  # lets a stream end with an error, if the client reads events
    beginning: Beginning | None = None  # an answer's first bytes, if they may turn out to be an error
    kept: "KeptAnswer | None" = None  # the begun part of a whole answer, which another replica can repeat
    # The same before and after resuming:
    response_id: str = ""  # empty until a replica of ours was asked
    _created: int = 0
    _seed: int | None = None
    _said: dict[int, list[bytes]] = field(default_factory=dict)  # token ids by choice, packed
    _why_alone: str = ""  # why no other replica could continue it, where that is known from the start

    # ---- the choice of a replica

    def goes_to(self, member: Member) -> bool:
        """Prepare for a replica; return whether it can go on with what the client has."""
        self.beginning, has_bytes = None, self.exchange.sent_bytes > 0
        reader, prompt, kind = self.reader, self.prompt, self.type
        if kind.generation is None:
            if isinstance(reader, Repetition) and has_bytes:
                reader.begin()
            else:
                reads = self.may_resume and member.spec.resume and kind.api in APIS and self.streams
                self.reader = Repetition(kind.api, self.ends) if reads else None
            return True
        assert prompt is not None, "a generation is read"
        if not self.exchange.response_started or (reader is None and not has_bytes):
            reads = self.may_resume and self.streams and member.spec.resume and self._says_ids(member)
            self.reader = self._new_continuation(prompt) if reads else None
            return True
        if reader is None:
            if member.profile.takes_envelope:
                return True
            # A native replica began the stream.
            self.reader = reader = self._new_continuation(prompt)
            if reader is not None and has_bytes:
                reader.begun_by_ours(self._head(prompt))
                reader.settle(unpack_ids(b"".join(self._said.get(0, ()))))
        return isinstance(reader, Continuation) and reader.fits(member.profile, member.spec.max_model_len)

    def _may_go_on(self, attempt: Attempt, member: Member) -> bool:
        """Return whether, as far as is known now, this replica could go on with what the client has."""
        if self.type.generation is None:
            return self._why_not_repeated() is None
        reader, profile = self.reader, member.profile
        if self.events is None or not self.may_resume:
            return False
        if reader is not None:
            return reader.why_not is None and (profile.takes_envelope or profile.takes_token_ids)
        return attempt.framed and profile.takes_envelope

    def _says_ids(self, member: Member) -> bool:
        return self.type.api in member.profile.tells_ids

    def _new_continuation(self, prompt: Prompt) -> Continuation | None:
        prompts, api = None if self.model is None else self.model.tokens.prompts, self.type.generation
        assert api is not None, "it is a generation"
        if not api.is_inner:
            why: str | None = f"only replicas of warmroute continue an answer of {api.path}"
        elif prompts is None:
            why = "its model has no tokenizer here"
        elif prompt.read_apart:
            why = "its body is too large to be sent on in another form"
        else:
            why = why_alone(prompt, self.body)
        if prompts is None or why is not None:
            self._why_alone = why or ""
            return None
        return Continuation(api.is_chat, prompt, self.body, prompts.tokenizer)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer of the model; empty: they are not known."""
        prompts = None if self.model is None else self.model.tokens.prompts
        if prompts is None:
            return frozenset()
        return prompts.tokenizer.special_token_ids.union(prompts.tokenizer.eos_token_ids)

    def _head(self, prompt: Prompt) -> tuple[str, int, str]:
        return self.response_id, self._created, prompt.peek.model

    # ---- what a replica is sent

    def foreign_body(self, member: Member) -> tuple[bytes, bytes | None]:
        """The body for a foreign replica, and its path if that differs: the client's, or one to continue the answer."""
        prompt = self.prompt
        assert prompt is not None, "a generation is read"
        body = self.body if prompt.salt is None else salted_for(prompt, self.body)
        reader = self.reader
        if not isinstance(reader, Continuation):
            return body, None
        if reader.ids:
            return reader.resume(body, member.spec.max_model_len), COMPLETIONS_PATH
        reader.relay()
        return with_ids(body) if self._says_ids(member) else body, None

    def envelope(self, priority: float, neighbours: Sequence[Neighbour], new_id: Callable[[], str]) -> bytes:
        """The bytes before the body for a replica of ours: the token ids of the prompt, and of the answer so far.

        `neighbours`: that it may read the prompt's KV from. `new_id` draws the id of an answer that has none.
        """
        prompt = self.prompt
        assert prompt is not None, "a generation is read"
        if not self.response_id:
            self.response_id = new_id()
            self._created = int(time.time())
            if prompt.peek.seed is None:
                self._seed = random.getrandbits(63)
        resumed: list[bytes] = []
        if isinstance(self.reader, Continuation):
            self.reader.relay_native()
            resumed = [pack_ids(self.reader.ids)] if self.reader.ids else []
        elif self._said:
            choices = max(prompt.choices, max(self._said) + 1)
            resumed = [b"".join(self._said.get(choice, ())) for choice in range(choices)]
        native = Native(
            prompts=prompt.packed,
            resume_token_ids=resumed,
            response_id=self.response_id,
            created=self._created,
            seed=self._seed,
            priority=priority,
            cache_salt=prompt.salt,
            retain=prompt.retain,
            tells_use=len(prompt.packed) != 1 or prompt.choices > 1,
        )
        if len(prompt.packed) == 1:
            native.kv_sources = [KvSource(one.endpoint, one.tokens) for one in neighbours]
        return envelope(native)

    def asks_tokens(self, member: Member) -> bool:
        """Return whether only tokens can tell if this replica has given the answer up."""
        asks = self.type.api == RESPONSES.name and self.type.generation is None and member.profile.hides_aborts
        # A gateway gets answers as they are, with the tokens.
        asks = asks and member.spec.resume and self.router.config.resume and not self.flow.is_single
        return asks and FIELD not in self.body and bool(self.ends) and self.may_repeat

    # ---- what its attempt tells

    def begun(self, attempt: Attempt) -> None:
        """Handle a successful response; its head may be sent on."""
        exchange, api = self.exchange, self.type.generation
        self.flow.head()
        self.router.answered(attempt)
        if api is not None and attempt.cached_tokens is not None and not self.flow.resumes:
            self.hit.reported_tokens = attempt.cached_tokens
            if self.prefill is not None and self.flow.decision is not None:
                self.prefill.found(self.flow.decision, attempt.cached_tokens)
        if exchange.response_started or exchange.disconnected:
            return  # another replica has begun the response
        if api is not None and self.flow.is_single:
            self._start_answer(attempt, None)
        elif attempt.framed:
            if api is not None and self.streams:  # a whole answer comes at the end, in one piece
                self._start_answer(attempt, None, SSE_TYPE)
                self.events = SentEvents(api)
        else:
            streams = attempt.content_type.startswith(SSE_TYPE)
            if not streams and self.type.api and not self.streams and self.may_repeat:
                return  # another replica can repeat it until it is complete
            if streams and self.type.api and attempt.placed.fetched_tokens:
                self.beginning = Beginning(self.type.api)
            else:
                self._open(attempt, streams)

    def _open(self, attempt: Attempt, streams: bool) -> None:
        """Start the answer, which another replica can go on with if it comes in events."""
        if not streams:
            self.reader = None
        length = None if self.reader is not None else length_of(attempt.headers)
        api = APIS.get(self.type.api)
        if streams and length is None and api is not None and not self.flow.is_single:
            self.events = SentEvents(api)
        else:
            self.reader = None
        self._start_answer(attempt, length)

    def _start_answer(self, attempt: Attempt, length: int | None, usual_type: bytes = JSON_TYPE) -> None:
        self.exchange.start(attempt.status, self._head_of(attempt, usual_type), length=length)

    def _head_of(self, attempt: Attempt, usual_type: bytes = JSON_TYPE) -> bytes:
        if not attempt.framed:
            return lines(attempt.headers, TO_CLIENT) + attempt.member.name_line
        content_type = value_of(attempt.headers, b"x-warmroute-content-type") or usual_type
        head = lines(attempt.headers, FROM_FRAMES) + attempt.member.name_line
        return b"content-type: %b\r\n" % content_type + head

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        exchange, report, kind = self.exchange, attempt.report, self.type
        if kind.api:
            if body and not attempt.begun_s:
                self.router.computed(attempt)
            if self.beginning is not None:  # it starts once it has a token
                held = self.beginning.feed(body, complete)
                if held is None:
                    return
                if self.beginning.has_failed:
                    self._compute_here(attempt)
                    return
                body, self.beginning = held, None
                self.router.placement.fetched(attempt.placed, self.router.now_s())
                self._open(attempt, True)
            if not self.first_byte_s:
                now_s = self.first_byte_s = self.router.now_s()
                if self.hit.outlook is not None and (decision := self.flow.decision) is not None:
                    question = decision.question
                    self.router.placement.came(question.tenant, self.hit.outlook, now_s - (question.came_s or now_s))
        elif kind.of_response:
            self.is_background |= b'"background":true' in body
        if report is not None:  # else it is in frames, or a refusal
            self.report = report
            report.read(body)
            if report.cached is not None:
                if kind.generation is None:
                    self.hit.reported_tokens = report.cached
                elif self.hit.reported_tokens is None and not self.flow.resumes and self.prompt is not None:
                    self._told(attempt.member, self.prompt, report)
        reader, events = self.reader, self.events
        if reader is not None:
            body, lost = reader.read(body, complete)
            if report is not None:
                report.read_tokens = reader.new_tokens
            if lost is not None:
                # The replica is not to blame if what it repeats differs.
                self._lose(attempt, body, Broken(lost, ours=lost == reader.why_not))
                return
        elif events is not None and not attempt.framed:
            if kind.generation is not None and not exchange.sent_bytes and is_servers_error(body):
                self._lose(attempt, b"", Broken("its stream is an error"))
                return
            if (events.mark in body or not events.is_between) and (before := events.before_abort(body)) is not None:
                self._lose(attempt, before, Broken(ABORTED))
                return
        if complete:
            self._complete(attempt, body)
        elif not exchange.response_started:
            if self.kept is None:
                self.kept = KeptAnswer(self.router.held)
            if not self.kept.keep(body):  # it is too long, and sent on
                kept = self.kept.take()
                self._start_answer(attempt, None if attempt.framed else length_of(attempt.headers))
                exchange.send(kept)
                exchange.send(body)
        elif body:
            exchange.send(body)
            if events is not None:
                events.note(body)
                if reader is None and report is not None and events.is_plain and attempt.sending is not None:
                    attempt.sending.pass_on = self._pass_on  # it takes the next parts
        else:
            exchange.flush()

    def _told(self, member: Member, prompt: Prompt, report: Report) -> None:
        """Note the engine's report of its cached tokens."""
        self.hit.reported_tokens = report.cached
        verification, model = self.router.verification, self.model
        # Comparing the prompt's length costs nothing, and covers every field of the request.
        if prompt.shape is None or not prompt.exact or len(prompt.packed) > 1 or model is None or verification is None:
            return
        if report.prompt is not None and report.prompt != prompt.tokens:
            verification.other_length(member, model.tokens, prompt, report.prompt)
            self.hit.prediction = None  # it was made for other tokens, so it tells nothing of the index

    def _pass_on(self, body: bytes) -> bool:
        """Do as `take`, for whole events in the middle of a stream of which nothing more is to be read."""
        attempt, report, events = self.attempt, self.report, self.events
        if attempt is None or report is None or events is None:
            return False
        is_whole = events.is_between and len(body) >= LONGEST_END and body.endswith(b"\n\n")
        if not is_whole or MARK in body or events.mark in body:
            return False
        attempt.spoken = BODY
        report.events += body.count(b"\n\n")
        events.end = body
        try:
            self.exchange.send(body)
        except Exception:  # it ends this request, and no other on the connection
            attempt.crash()
        return True

    def _complete(self, attempt: Attempt, body: bytes) -> None:
        exchange, kind = self.exchange, self.type
        if self.kept is not None:
            body = self.kept.take() + body
        is_unread = self.events is None and not attempt.framed and attempt.status < 400
        if is_unread and not (kind.generation is not None and self.flow.is_single):
            given_up = False
            # The client knows the length of an answer that was sent on as it came.
            if kind.generation is None and not exchange.response_started and self.asks_tokens(attempt.member):
                body, given_up = without_tokens(body, self.ends)
            if given_up or is_aborted(kind.api, body, attempt.member.profile):
                self._lose(attempt, b"", Broken(ABORTED))
                return
        # A long refusal is passed on like an answer, and comes to its end here.
        self.end_attempt()
        if exchange.response_started:
            exchange.finish(body)
        else:
            exchange.answer(attempt.status, self._head_of(attempt), body)

    def holds(self, pending_bytes: int) -> bool:
        """Claim memory for an unfinished frame; return whether there is room."""
        if self.kept is None:
            self.kept = KeptAnswer(self.router.held)
        return self.kept.hold_beside(pending_bytes)

    def end_attempt(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            self.router.attempt_over(attempt)

    # ---- when a replica is lost

    def _compute_here(self, attempt: Attempt) -> None:
        """Send the request again without parameters, as the replica could not fetch the prompt's KV."""
        if self.prefill is not None:
            self.prefill.unread()
        self.flow.unread(attempt)

    def refused(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        if attempt.status == 500 and attempt.placed.fetched_tokens and not self.exchange.response_started:
            self._compute_here(attempt)  # vLLM says so if it could not fetch KV
            return
        row, reason = refusal(attempt.status, body)
        if not self.flow.refused(attempt, row, reason, self.router.now_s()):
            return
        # The client gets it; the rest of a long one comes like that of an answer.
        self.reader = None
        self._start_answer(attempt, length_of(attempt.headers) or (len(body) if complete else None))
        if complete:
            self.end_attempt()
            self.exchange.finish(body)
        else:
            self.exchange.send(body)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        if self.type.generation is None and self.beginning is not None and not broken.refused:
            self.beginning = None
            self._compute_here(attempt)  # KV could not be read
            return
        if self.kept is not None:
            self.kept.take()  # another replica repeats it
        for choice, packed in attempt.token_ids.items():
            self._said.setdefault(choice, []).extend(packed)
        if self.prefill is not None and attempt.placed.fetched_tokens and loss(broken) in NOT_REACHED:
            self.prefill.give_back()
        self.flow.broke(attempt, broken, has_bytes=self.exchange.sent_bytes > 0)

    def _lose(self, attempt: Attempt, body: bytes, broken: Broken) -> None:
        """Treat the replica as lost, since its answer has failed after this part of it."""
        self.exchange.send(body)
        if body and self.events is not None:
            self.events.note(body)
        attempt.cancel()
        attempt.member.health.probe_soon(self.router.now_s())  # it may be asleep, or end
        self.failed(attempt, broken)

    def may_move(self, attempt: Attempt, members: Sequence[Member]) -> bool:
        """Return whether the request could continue at one of these replicas instead of waiting for its own."""
        if not self.flow.may_leave():
            return False
        exchange, own, name = self.exchange, attempt.member, self.model_name
        is_generation, has_bytes = self.type.generation is not None, exchange.sent_bytes > 0
        started = exchange.response_started and not (is_generation and self.reader is None and not has_bytes)
        longest, prompt = own.candidate.max_model_len, self.prompt
        tokens = prompt.tokens if prompt is not None and prompt.exact else 0
        for member in members:
            one = member.candidate
            if member is own:
                able = is_generation and one.unavailable is None
            else:
                able = can_take(one, tokens, self.flow.tried) and (name is None or member.serves(name))
                # The generated tokens are part of the prompt there.
                longer = not started or one.max_model_len is None or one.max_model_len >= (longest or 0)
                able = able and (longer or not is_generation)
            if able and (not started or self._may_go_on(attempt, member)):
                return True
        return False

    def complete(self, attempt: Attempt) -> tuple[bool, str | None]:
        """Finish half an answer if it needs no replica. Return whether it is finished; else why none can go on."""
        exchange, reader, prompt, length = self.exchange, self.reader, self.prompt, attempt.member.spec.max_model_len
        has_bytes, why_not = exchange.sent_bytes > 0, None
        if self.events is not None and self.events.is_complete:
            exchange.finish()
            return True, None
        if self.type.generation is None or prompt is None:
            return False, self._why_not_repeated()
        if has_bytes or reader is not None:
            if not self.may_resume:
                why_not = "resuming is switched off"
            elif not isinstance(reader, Continuation):
                # A replica that was lost before its head has added nothing.
                if not attempt.framed and attempt.status:
                    why_not = self._why_alone or "its token ids are not known"
            else:
                if reader.head is not None:
                    self.response_id, self._created, _ = reader.head
                elif attempt.framed and has_bytes:
                    reader.begun_by_ours(self._head(prompt))
                reader.settle(unpack_ids(b"".join(attempt.token_ids.get(0, ()))) if attempt.framed else None)
                why_not = reader.why_not
        if why_not is None and self.events is None:
            why_not = "the client has a part of a whole answer already"
        is_whole = isinstance(reader, Continuation) and reader.head is not None and reader.is_complete(length)
        if why_not is None and isinstance(reader, Continuation) and is_whole:
            exchange.finish(reader.ending())
            return True, None
        return False, why_not

    def _why_not_repeated(self) -> str | None:
        if not self.may_repeat:
            return HAS_BEGUN
        if not self.exchange.sent_bytes:
            return HAS_BEGUN if self.events is None else None
        return "the client has a part of it" if self.reader is None else self.reader.why_not

    def break_off(self, why: str) -> None:
        """End half an answer: a stream by its API's error event, anything else by cutting the connection."""
        if self.events is None:
            self.exchange.cut()
            return
        error = ApiError(502, f"the answer broke off, and no other replica could continue it: {why}")
        error.type, error.code = "server_error", "broken_stream"
        self.exchange.send(self.events.error_event(error))
        self.exchange.finish()


class KeptAnswer:
    """The beginning of an unstreamed answer, kept so that another replica can repeat it, within the router's budget."""

    __slots__ = ("_budget", "_bytes", "_held_bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes: bytearray | None = None
        self._held_bytes = 0  # bytes taken from the budget: these, and an unfinished frame

    def keep(self, body: bytes) -> bool:
        """Add a part; return False and add nothing if it is too long, or there is no room."""
        if self._bytes is None:
            self._bytes = bytearray()
        if len(self._bytes) + len(body) > MAX_KEPT_BYTES or not self._hold(self._held_bytes + len(body)):
            return False
        self._bytes += body
        return True

    def take(self) -> bytes:
        """Return what was kept, and release its memory."""
        if not self._held_bytes:
            return b""
        kept, self._bytes = bytes(self._bytes or b""), None
        self._hold(0)
        return kept

    def hold_beside(self, pending_bytes: int) -> bool:
        """Claim memory for an unfinished frame; return False if there is no room."""
        return self._hold(pending_bytes + len(self._bytes or b""))

    def _hold(self, wanted_bytes: int) -> bool:
        more = wanted_bytes - self._held_bytes
        if more > 0 and not self._budget.take(more):
            return False
        if more < 0:
            self._budget.give_back(-more)
        self._held_bytes = wanted_bytes
        return True
