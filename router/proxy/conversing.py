"""A request of an API that only engines speak: placed by its conversation, and passed on as it came."""

import asyncio
from dataclasses import dataclass
from functools import partial

from api.errors import ApiError, invalid
from api.generation_apis import APIS, RESPONSES, GenerationApi
from api.openai_responses.named import NamedResponses, may_name, named_in
from api.responses import CONTENT_TYPE
from router.members.broken import Broken
from router.members.members import Member, ServedModel
from router.placement.decision import Decision
from router.prompts.canonical import MOST_TEXT_BYTES, peek_of
from router.prompts.prompt import BYTES_PER_TOKEN, UNREADABLE, Peek, Prompt, by_text
from router.prompts.reading.client import is_quick
from router.prompts.reading.messages import Found
from router.proxy.aborts import ABORTED, is_aborted
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.figures import last_number
from router.proxy.forwarding import Forwarding, model_in
from router.proxy.generation import Generation
from router.proxy.handover import Beginning
from router.proxy.headers import TO_CLIENT, lines, value_of
from router.proxy.kept_answer import KeptAnswer, SentEvents
from router.proxy.log_notes import Notes
from router.proxy.prefill import Prefill
from router.proxy.repetition import Repetition, is_repeatable
from router.proxy.request_summary import RequestSummary
from router.proxy.response_tokens import ASK, FIELD, without_tokens
from router.proxy.responses import Made, checked, new_response_id, with_id
from router.proxy.retries import Row
from router.proxy.sessions import session_of
from router.proxy.token_report import CACHED
from router.proxy.token_use import prompt_use
from router.tenants.limits import NOTHING, Use


def _checked(request: Forwarding, response_id: str, param: str | None = None) -> Made | None:
    """Read the id of a response; raise ApiError 404 if the response may be another tenant's."""
    has_salts = request.router.admission.has_salts
    return checked(response_id, request.admitted.cache_salt(None), param, has_salts=has_salts)


async def _holder(request: Forwarding, response_id: str, made: Made | None) -> str | None:
    """The name of the replica that has the response; None: whichever gets the request says that it is gone."""
    if made is not None:
        for member in request.router.members:
            # Another engine keeps what it makes; a replica of ours may have gone on with another one's.
            if made.at(member.name) and not member.profile.takes_envelope and member.candidate.unavailable is None:
                return member.name
    return await request.router.responses.holder(response_id, made)


@dataclass(slots=True, eq=False)
class Conversing(Forwarding):
    api: str = ""
    peek: Peek | None = None
    model: ServedModel | None = None
    _holder: str | None = None  # the replica that has the response which this one continues
    _beginning: Beginning | None = None  # of an answer that may turn out to be an error
    _repetition: Repetition | None = None  # of a stream that another replica could repeat
    _repeatable: bool | None = None  # None: not asked yet

    @property
    def _streams(self) -> bool:
        return self.peek is not None and bool(self.peek.stream)

    def serve(self, exchange: Exchange) -> None:
        """Begin with the whole body: as a generation where only replicas of ours can answer."""
        api = APIS.get(self.api)
        if api is None or not self._is_for_ours(exchange):
            Forwarding.serve(self, exchange)  # super() would fail: `slots` makes a new class
            return
        if api is RESPONSES and may_name(exchange.body):
            self.aside(partial(self._generate_continued, api, exchange))
        else:
            self._generate(api, exchange)

    def _generate(self, api: GenerationApi, exchange: Exchange) -> None:
        Generation(self.router, exchange, self.admitted, self.arrived_s, api=api).serve(exchange)

    async def _generate_continued(self, api: GenerationApi, exchange: Exchange) -> None:
        """Put the conversation of the previous response into the body: then any replica can go on with it."""
        named = await self._named(exchange.body)
        made = {response_id: _checked(self, response_id, param) for response_id, param in named}
        # The newest of the responses that have the items has all of them in its conversation.
        for response_id, items in ((named.previous, "previous_items"), (named.newest, "referenced_items")):
            if response_id is not None:
                await self.router.responses.join(exchange, response_id, made[response_id], items)
        exchange.aside = None
        self._generate(api, exchange)

    async def _named(self, body: bytes | bytearray) -> NamedResponses:
        """The responses that the body names."""
        if is_quick(body):
            try:
                return named_in(body)
            except UNREADABLE as error:
                found = Found({}, chat=False, error=str(error))
        else:
            found = await self.router.reading.found(body)
        if found.error is not None and self.router.admission.has_salts:
            raise invalid(f"the body is no JSON object that could be searched for responses: {found.error}")
        return found.named

    def _is_for_ours(self, exchange: Exchange) -> bool:
        members = self.router.members
        if all(model.is_ours for model in members.models.values()):
            return bool(members.models)
        model = members.models.get(model_in(exchange.body) or "") if is_quick(exchange.body) else None
        return model is not None and model.is_ours

    # ---- the prompt

    def _make_ready(self) -> None:
        if self.api == RESPONSES.name and may_name(self._body):
            self.aside(self._make_ready_continued)
        else:
            self._make_ready_checked()

    async def _make_ready_continued(self) -> None:
        named = await self._named(self._body)
        made = {response_id: _checked(self, response_id, param) for response_id, param in named}
        wanted = named.previous or named.newest
        if wanted is not None:
            self._holder = await _holder(self, wanted, made[wanted])
        self.exchange.aside = None
        self._make_ready_checked()

    def _make_ready_checked(self) -> None:
        body, name = self._body, self._model
        if name is None or not body:
            if body and self.router.config.special_tokens_in_text == "refuse":
                raise invalid("model is missing; its tokens are those that texts may not spell", "model")
            self.place()
            return
        model = self.model = self.router.members.model(name)
        peek = peek_of(self.api, body, name) if is_quick(body) else None
        if peek is None:
            self.peek = Peek(name)
            if model.tokens.refuses_texts:
                self.router.in_thread(partial(self._by_text, model, self.peek, body), len(body), self._made)
            else:
                self.prompt = self._by_text(model, self.peek, body)
                self._count_batch()
                self.place()
            return
        self.peek = peek
        make = partial(model.tokens.draft, self.api, body, peek, model.lora, peek.cache_salt, model.max_model_len)
        if model.tokens.is_quick(body) and (draft := make()).is_quick:
            self.prompt = draft.finish()
            self._count_batch()
            self.place()
        else:
            self.router.in_thread(lambda: make().finish(), len(body), self._made)

    def _by_text(self, model: ServedModel, peek: Peek, body: bytes) -> Prompt:
        model.tokens.check_texts(self.api, body)
        return by_text(model.tokens.model, peek, model.lora, body[:MOST_TEXT_BYTES])

    def _made(self, made: asyncio.Future[Prompt]) -> None:
        if not made.cancelled() and not self.is_over:
            self.exchange.guard(self._place_made, made)

    def _place_made(self, made: asyncio.Future[Prompt]) -> None:
        try:
            self.prompt = made.result()
            self._count_batch()
        except ApiError as error:
            self.refuse(error)
        else:
            self.place()

    def _count_batch(self) -> None:
        """Count the conversations after the first, which are not read, by their bytes."""
        if self.api == "batch" and isinstance(self.prompt, Prompt):
            self.prompt.all_tokens = max(self.prompt.tokens, len(self._body) // BYTES_PER_TOKEN)

    # ---- what it uses

    def expected_use(self) -> Use | None:
        return prompt_use(self.prompt.all_tokens, self.hit.cached_tokens) if isinstance(self.prompt, Prompt) else None

    def used(self) -> Use:
        report, prompt = self.report, self.prompt
        if not isinstance(prompt, Prompt):
            return Forwarding.used(self)
        if self.exchange.status >= 400 or all(attempt.status >= 400 for attempt in self.attempts):
            return NOTHING
        hit = self.hit if self.prefill is None or self.prefill.outcome != "handed" else self.prefill.hit
        if report is None:
            return prompt_use(prompt.all_tokens, hit.cached_tokens)
        if self.api == "responses" and not report.is_whole:
            # Its first events repeat fields of the request, in which a client may have written any figures.
            return prompt_use(prompt.all_tokens, 0, report.counted)
        tokens = prompt.all_tokens if report.prompt is None else report.prompt
        return prompt_use(tokens, hit.cached_tokens, report.tokens)

    # ---- the choice

    def _choose(self) -> Decision:
        model, prompt = self.model, self.prompt
        if model is None or not isinstance(prompt, Prompt):
            return Forwarding._choose(self)  # super() would fail: `slots` makes a new class
        router = self.router
        model = self.model = router.members.model(model.name)
        found = session_of(self.exchange.scope["headers"], None if self.peek is None else self.peek.prompt_cache_key)
        session = None if found is None else found.key
        is_looked_up = self.api != "batch"  # several prompts
        only = self._only(model)
        decision = self.hit.decide(
            router,
            model,
            prompt,
            session,
            self.tried,
            self.came_s,
            is_looked_up=is_looked_up,
            only=only,
            source=self._source,
            tenant=self.tenant,
        )
        if router.history.request_log is not None:
            self.notes = self.notes or Notes()
            self.notes.body = self._body if router.config.log_prompts else b""
            members = [router.members.by_name[one.name] for one in decision.candidates]
            self.notes.decided(next(router.order), decision, members, router.feeds)
        return decision

    def _only(self, model: ServedModel) -> Member | None:
        """The replica that alone can answer, while it serves the model."""
        holder = None if self._holder is None else self.router.members.by_name.get(self._holder)
        return holder if holder is not None and holder in model.members and holder.name not in self.tried else None

    def _computes_elsewhere(self, decision: Decision) -> bool:
        model, prompt, peek = self.model, self.prompt, self.peek
        if model is None or not model.splits or peek is None or not isinstance(prompt, Prompt):
            return False
        if self.prefill is None:
            self.prefill = Prefill(self.router, self.exchange, self.admitted, self.api, peek, self.place)
        return self.prefill.begin(
            decision,
            model,
            prompt,
            self._body,
            session=decision.question.session,
            came_s=self.came_s,
            attempts=self.attempts,
            notes=self.notes,
        )

    # ---- to a replica

    def _send(self, member: Member, decision: Decision) -> bool:
        self._beginning = None
        if self.exchange.sent_bytes:
            assert self._repetition is not None, "else it has broken off"
            self._repetition.begin()
        else:
            self._repetition = self._new_repetition(member)
        sent = Forwarding._send(self, member, decision)
        if isinstance(self.prompt, Prompt) and self.prompt.shape is not None and not member.profile.takes_envelope:
            self.hit.verify(self.router, self.model, self.prompt, self.api, self._body)
        return sent

    def _new_repetition(self, member: Member) -> Repetition | None:
        reads = self._streams and member.spec.resume and self.router.config.resume and self.api in APIS
        return Repetition(self.api, self._ends) if reads and self._may_repeat else None

    @property
    def _may_repeat(self) -> bool:
        if self._repeatable is None:
            self._repeatable = is_repeatable(self.api, self._body)
        return self._repeatable

    @property
    def _ends(self) -> frozenset[int]:
        """The tokens that end an answer of the model; empty: they are not known."""
        prompts = None if self.model is None else self.model.tokens.prompts
        if prompts is None:
            return frozenset()
        return prompts.tokenizer.special_token_ids.union(prompts.tokenizer.eos_token_ids)

    def _asks_tokens(self, member: Member) -> bool:
        """Return whether only tokens can tell if this replica has given the answer up."""
        asks = self.api == RESPONSES.name and member.profile.hides_aborts and member.spec.resume
        return asks and self.router.config.resume and FIELD not in self._body and bool(self._ends) and self._may_repeat

    def _body_for(self, member: Member, decision: Decision) -> bytes:
        body = self._with_kv(member, decision, self._body)
        if self.api != RESPONSES.name or not member.profile.names_responses:
            return body
        again = self._repetition.response_id if self._repetition is not None else ""
        salt = self.admitted.cache_salt(None)
        # What is repeated is kept under the id that the client has.
        body = with_id(body, again or new_response_id(salt, member.name, self._model or ""))
        return body.rstrip()[:-1] + ASK + b"}" if self._asks_tokens(member) else body

    # ---- the answer

    def begun(self, attempt: Attempt) -> None:
        self._is_answered()
        self.router.answered(attempt)
        if not self.exchange.response_started and (self._streams or not self._may_repeat):
            self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        """Start the answer; one whose KV is fetched may turn out to be an error, so it starts with its first token."""
        streams = (value_of(attempt.headers, b"content-type") or b"").startswith(CONTENT_TYPE.encode())
        if attempt.status < 400 and streams and attempt.placed.fetched_tokens:
            self._beginning = Beginning(self.api)
        else:
            self._open(attempt, streams)

    def _open(self, attempt: Attempt, streams: bool) -> None:
        if (
            streams
            and attempt.status < 400
            and self.api in APIS
            and value_of(attempt.headers, b"content-length") is None
        ):
            self._events = SentEvents(APIS[self.api])
        Forwarding._start(self, attempt)

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        if body:
            self.router.computed(attempt)
        if self._beginning is not None:
            held = self._beginning.feed(body, complete)
            if held is None:
                return
            if self._beginning.has_failed:
                self._compute_here(attempt)
                return
            self.router.placement.fetched(attempt.placed, self.router.now_s())
            self._open(attempt, True)
            self._beginning, body = None, held
        if not self.first_byte_s:
            self.first_byte_s = self.router.now_s()
        if not self.exchange.response_started:
            self._take_whole(attempt, body, complete)
            return
        lost: str | None = None
        if self._events is not None and self._repetition is not None:
            body, lost = self._repetition.read(body, complete)
        elif self._events is not None and (before := self._events.before_abort(body)) is not None:
            body, lost = before, ABORTED
        self._note_answer(body)
        if lost is not None:
            differs = self._repetition is not None and self._repetition.why_not == lost
            self._lose(attempt, body, Broken(lost, ours=differs))  # which is no fault of the replica
            return
        Forwarding.take(self, attempt, body, complete)
        self._events_note(body)

    def _events_note(self, body: bytes) -> None:
        if self._events is not None and body:
            self._events.note(body)

    def _note_answer(self, body: bytes) -> None:
        if (cached := last_number(body, *CACHED)) is not None:
            self.hit.reported_tokens = cached

    def _take_whole(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        """Keep a whole answer until it is complete, so that another replica can repeat it; send a long one on."""
        if (report := attempt.report) is not None:  # read as it comes, since all of it would take long
            self.report = report
            report.read(body)
            if report.cached is not None:
                self.hit.reported_tokens = report.cached
        if self._kept is None:
            self._kept = KeptAnswer(self.router.held)
        if not complete and self._kept.keep(body):
            return
        body = self._kept.take() + body
        given_up = False
        if complete and self._asks_tokens(attempt.member):
            body, given_up = without_tokens(body, self._ends)
        if complete and (given_up or is_aborted(self.api, body, attempt.member.profile)):
            self._lose(attempt, b"", Broken(ABORTED))
            return
        if complete:
            self._end_attempt(attempt)
            self.exchange.answer(attempt.status, lines(attempt.headers, TO_CLIENT) + attempt.member.name_line, body)
        else:
            self._start(attempt)
            self.exchange.send(body)

    # ---- what goes wrong

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        if self._beginning is not None and not broken.refused:  # KV could not be read
            self._beginning = None
            self._compute_here(attempt)
        else:
            Forwarding.failed(self, attempt, broken)

    def _why_not_again(self, attempt: Attempt, row: Row) -> str | None:
        exchange = self.exchange
        if not exchange.response_started or not self._may_repeat:
            return Forwarding._why_not_again(self, attempt, row)
        if not exchange.sent_bytes:
            return None if self._events is not None else "its answer has begun"
        if self._repetition is None:
            return "the client has a part of it"
        return self._repetition.why_not

    def summary(self) -> RequestSummary:
        summary = Forwarding.summary(self)
        summary.first_byte_s, summary.waited_s = self.first_byte_s, self.waited_s
        summary.why, summary.model = self.why, self.model or summary.model
        summary.output_tokens = None if self.report is None else self.report.generated
        summary.attempts, summary.notes = self.attempts, self.notes
        summary.prefill = None if self.prefill is None else self.prefill.summary()
        if self.decision is not None and self.peek is not None and isinstance(self.prompt, Prompt):
            summary.generation = self.hit.summary(self.peek, self.prompt, self.decision)
        return summary


@dataclass(slots=True, eq=False)
class OfResponse(Forwarding):
    """A request about a response by its id, for the replica that holds it."""

    _holder: str | None = None
    _is_background: bool = False  # whoever asked for it was not told what was generated

    @property
    def _computes(self) -> bool:
        return False

    @property
    def _may_repeat(self) -> bool:
        return False  # another replica would say that there is no such response

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        self._is_background |= b'"background":true' in body
        Forwarding.take(self, attempt, body, complete)

    def used(self) -> Use:
        """The tokens that an engine has generated for it in the background; its prompt was charged when it came."""
        if self.report is None or not self._is_background or self.exchange.status >= 400:
            return NOTHING
        return prompt_use(0, 0, self.report.tokens)

    def _make_ready(self) -> None:
        response_id = self.exchange.scope["path"].split("/")[3]  # of /v1/responses/ID, and perhaps /cancel
        made = _checked(self, response_id)
        self.aside(partial(self._make_ready_asked, response_id, made))

    async def _make_ready_asked(self, response_id: str, made: Made | None) -> None:
        self._holder = await _holder(self, response_id, made)
        self.exchange.aside = None
        self.place()

    def _choose(self) -> Decision:
        member = None if self._holder is None else self.router.members.by_name.get(self._holder)
        if member is None or member.name in self.tried:
            return Forwarding._choose(self)
        question, _ = self.router.placement.question(
            self.prompt, {}, self.router.now_s(), tried=self.tried, came_s=self.came_s
        )
        return self.router.placement.decide(question, [member.candidate], policy="least-loaded")
