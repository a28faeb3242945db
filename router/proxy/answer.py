"""The answer in progress: it listens to the attempts, and passes on what they bring.

A generation goes on by token ids: of a stream from our own replicas only those are kept; a foreign engine's stream is
parsed on its way (`resume`). Of the Messages and Responses APIs of foreign engines, another replica repeats the stream
(`repetition`). A whole answer is kept until it is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from api.errors import ApiError
from api.generation_apis import APIS
from api.responses import CONTENT_TYPE
from router.members.broken import Broken
from router.members.members import Member
from router.placement.cost import can_take
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.facts import RequestFacts
from router.proxy.flow import Flow
from router.proxy.headers import FROM_FRAMES, TO_CLIENT, length_of, lines, value_of
from router.proxy.prefill import Beginning, Prefill
from router.proxy.progress import Progress
from router.proxy.retries import NOT_REACHED, Budget, loss, refusal
from router.proxy.services import Services
from router.proxy.streams.events import ABORTED, SentEvents, is_aborted, is_servers_error
from router.proxy.streams.passage import let_pass
from router.proxy.streams.repetition import without_tokens

JSON_TYPE = b"application/json"
SSE_TYPE = CONTENT_TYPE.encode()
MAX_KEPT_BYTES = 4 * 1024 * 1024
HAS_BEGUN = "its answer has begun"


class KeptAnswer:
    """The beginning of an unstreamed answer, kept so that another replica can repeat it, within the router's budget."""

    __slots__ = ("_budget", "_bytes", "_held_bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes = bytearray()
        self._held_bytes = 0  # bytes taken from the budget: these, and an unfinished frame

    def keep(self, body: bytes) -> bool:
        """Add a part; return False and add nothing if it is too long, or there is no room."""
        pending_bytes = self._held_bytes - len(self._bytes)
        if len(self._bytes) + len(body) > MAX_KEPT_BYTES or not self.hold(pending_bytes + len(body)):
            return False
        self._bytes += body
        return True

    def take(self) -> bytes:
        kept, self._bytes = bytes(self._bytes), bytearray()
        self.hold(0)
        return kept

    def hold(self, pending_bytes: int) -> bool:
        """Claim memory for what is kept, and an unfinished frame; return False if there is no room."""
        more = pending_bytes + len(self._bytes) - self._held_bytes
        if not self._budget.take(more):
            return False
        self._held_bytes += more
        return True


@dataclass(slots=True, eq=False)
class Answer:
    facts: RequestFacts
    exchange: Exchange
    flow: Flow
    router: Services
    progress: Progress
    prefill: Prefill | None = None
    events: SentEvents | None = None  # lets a stream end with an error, if the client reads events
    beginning: Beginning | None = None  # an answer's first bytes, if they may turn out to be an error
    kept: KeptAnswer | None = None  # the begun part of a whole answer, which another replica can repeat

    @property
    def model_name(self) -> str | None:
        return self.facts.model_name

    # ---- what its attempt tells

    def begun(self, attempt: Attempt) -> None:
        exchange, facts, flow = self.exchange, self.facts, self.flow
        kind = facts.type
        api = kind.generation
        flow.head()
        self.router.answered(attempt)
        if api is not None and attempt.cached_tokens is not None and not flow.resumes:
            facts.hit.reported_tokens = attempt.cached_tokens
            if self.prefill is not None and flow.decision is not None:
                self.prefill.found(flow.decision, attempt.cached_tokens)
        if exchange.response_started or exchange.disconnected:
            return  # another replica has begun the response
        if api is not None and flow.is_single:
            self._start_answer(attempt, None)
        elif attempt.framed:
            if api is not None and facts.streams:  # a whole answer comes at the end, in one piece
                self._start_answer(attempt, None, SSE_TYPE)
                self.events = SentEvents(api)
        else:
            streams = attempt.content_type.startswith(SSE_TYPE)
            if not streams and kind.api and not facts.streams and facts.may_repeat:
                return  # another replica can repeat it until it is complete
            if streams and kind.api and attempt.placed.fetched_tokens:
                self.beginning = Beginning(kind.api)
            else:
                self._open(attempt, streams)

    def _open(self, attempt: Attempt, streams: bool) -> None:
        """Start the answer, which another replica can go on with if it comes in events."""
        progress, api = self.progress, APIS.get(self.facts.type.api)
        if not streams:
            progress.reader = None
        length = None if progress.reader is not None else length_of(attempt.headers)
        if streams and length is None and api is not None and not self.flow.is_single:
            self.events = SentEvents(api)
        else:
            progress.reader = None
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
        exchange, report, facts = self.exchange, attempt.report, self.facts
        kind = facts.type
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
            if not facts.first_byte_s and exchange.is_watched:
                now_s = facts.first_byte_s = self.router.now_s()
                if facts.hit.outlook is not None and (decision := self.flow.decision) is not None:
                    question = decision.question
                    late_s = now_s - (question.came_s or now_s)
                    self.router.placement.came(question.tenant, facts.hit.outlook, late_s)
        elif kind.of_response:
            facts.is_background |= b'"background":true' in body
        if report is not None:  # else it is in frames, or a refusal
            facts.report = report
            report.read(body)
            if report.cached is not None:
                if kind.generation is None:
                    facts.hit.reported_tokens = report.cached
                elif facts.hit.reported_tokens is None and not self.flow.resumes:
                    facts.told(attempt.member, report)
        reader, events = self.progress.reader, self.events
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
            may_abort = not events.is_between or body.find(events.mark) >= 0
            if may_abort and (before := events.before_abort(body)) is not None:
                self._lose(attempt, before, Broken(ABORTED))
                return
        if complete:
            self._complete(attempt, body)
        elif not exchange.response_started:
            self.kept = self.kept or KeptAnswer(self.router.held)
            if not self.kept.keep(body):  # it is too long, and sent on
                kept = self.kept.take()
                self._start_answer(attempt, None if attempt.framed else length_of(attempt.headers))
                exchange.send(kept)
                exchange.send(body)
        elif body:
            exchange.send(body)
            if events is not None:
                events.note(body)
                if reader is None and events.is_plain:
                    let_pass(attempt, events)
        else:
            exchange.flush()

    def _complete(self, attempt: Attempt, body: bytes) -> None:
        exchange, kind = self.exchange, self.facts.type
        if self.kept is not None:
            body = self.kept.take() + body
        is_unread = self.events is None and not attempt.framed and attempt.status < 400
        if is_unread and not (kind.generation is not None and self.flow.is_single):
            given_up = False
            # The client knows the length of an answer that was sent on as it came.
            if kind.generation is None and not exchange.response_started and self.progress.asks_tokens(attempt.member):
                body, given_up = without_tokens(body, self.progress.ends)
            if given_up or is_aborted(kind.api, body, attempt.member.profile):
                self._lose(attempt, b"", Broken(ABORTED))
                return
        # A long refusal is passed on like an answer, and comes to its end here.
        self.facts.attempt = None
        self.router.attempt_over(attempt)
        if exchange.response_started:
            exchange.finish(body)
        else:
            exchange.answer(attempt.status, self._head_of(attempt), body)

    def holds(self, pending_bytes: int) -> bool:
        self.kept = self.kept or KeptAnswer(self.router.held)
        return self.kept.hold(pending_bytes)

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
        self.progress.reader = None
        self._start_answer(attempt, length_of(attempt.headers) or (len(body) if complete else None))
        if complete:
            self.facts.end_attempt()
            self.exchange.finish(body)
        else:
            self.exchange.send(body)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        if self.facts.type.generation is None and self.beginning is not None and not broken.refused:
            self.beginning = None
            self._compute_here(attempt)  # KV could not be read
            return
        if self.kept is not None:
            self.kept.take()  # another replica repeats it
        self.progress.keep(attempt)
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
        if not self.flow.may_leave():
            return False
        exchange, facts, own, reader = self.exchange, self.facts, attempt.member, self.progress.reader
        is_generation, name = facts.type.generation is not None, facts.model_name
        started = exchange.response_started and not (is_generation and reader is None and not exchange.sent_bytes)
        longest = own.candidate.max_model_len or 0
        for member in members:
            one = member.candidate
            if member is own:
                able = is_generation and one.unavailable is None
            else:
                able = can_take(one, facts.exact_tokens, self.flow.tried) and (name is None or member.serves(name))
                # The generated tokens are part of the prompt there.
                is_long = not started or one.max_model_len is None or one.max_model_len >= longest
                able = able and (is_long or not is_generation)
            if able and (not started or self._may_go_on(attempt, member)):
                return True
        return False

    def _may_go_on(self, attempt: Attempt, member: Member) -> bool:
        """Return whether, as far as is known now, this replica could go on with what the client has."""
        if self.facts.type.generation is None:
            return self._why_not_repeated() is None
        reader, profile = self.progress.reader, member.profile
        if self.events is None or not self.facts.may_resume:
            return False
        if reader is not None:
            return reader.why_not is None and (profile.takes_envelope or profile.takes_token_ids)
        return attempt.framed and profile.takes_envelope

    def complete(self, attempt: Attempt) -> tuple[bool, str | None]:
        if self.events is not None and self.events.is_complete:
            self.exchange.finish()
            return True, None
        if self.facts.type.generation is None:
            return False, self._why_not_repeated()
        why_not = self.progress.settle(attempt)
        if why_not is None and self.events is None:
            why_not = "the client has a part of a whole answer already"
        if why_not is None and (ending := self.progress.ending(attempt)) is not None:
            self.exchange.finish(ending)
            return True, None
        return False, why_not

    def _why_not_repeated(self) -> str | None:
        reader = self.progress.reader
        if not self.facts.may_repeat:
            return HAS_BEGUN
        if not self.exchange.sent_bytes:
            return HAS_BEGUN if self.events is None else None
        return "the client has a part of it" if reader is None else reader.why_not

    def break_off(self, why: str) -> None:
        """End half an answer: a stream by its API's error event, anything else by cutting the connection."""
        if self.events is None:
            self.exchange.cut()
            return
        error = ApiError(502, f"the answer broke off, and no other replica could continue it: {why}")
        error.type, error.code = "server_error", "broken_stream"
        self.exchange.send(self.events.error_event(error))
        self.exchange.finish()
