"""A request of an API that only engines speak: placed by its conversation, and passed on as it came."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from api.errors import ApiError, invalid
from api.generation_apis import APIS, RESPONSES, GenerationApi
from api.openai_responses.named import NamedResponses, may_name, named_in
from api.sse import CONTENT_TYPE
from router.members.broken import Broken
from router.members.members import Member, ServedModel
from router.placement.decision import Decision
from router.prompts.canonical import MOST_TEXT_BYTES, peek_of
from router.prompts.prompt import BYTES_PER_TOKEN, UNREADABLE, Peek, Prompt, by_text
from router.prompts.reading.client import is_quick
from router.prompts.reading.messages import Found
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.figures import last_number
from router.proxy.forwarding import Forwarding, model_in
from router.proxy.generation import Generation
from router.proxy.handover import Beginning
from router.proxy.headers import value_of
from router.proxy.log_notes import Notes
from router.proxy.predicted_hit import PredictedHit
from router.proxy.prefill import Prefill
from router.proxy.request_summary import RequestSummary
from router.proxy.responses import TAKE_IDS, Made, checked, new_response_id, with_id
from router.proxy.sessions import session_of
from router.proxy.token_report import CACHED
from router.proxy.token_use import prompt_use
from router.tenants.limits import NOTHING, Use

if TYPE_CHECKING:
    import asyncio


def _checked(request: Forwarding, response_id: str, param: str | None = None) -> Made | None:
    """Read the id of a response; raise ApiError 404 if the response may be another tenant's."""
    has_salts = request.router.admission.has_salts
    return checked(response_id, request.admitted.cache_salt(None), param, has_salts=has_salts)


async def _holder(request: Forwarding, response_id: str, made: Made | None) -> str | None:
    """The name of the replica that has the response; None: whichever gets the request says that it is gone."""
    if made is not None:
        for member in request.router.members:
            # Another engine keeps what it makes; a replica of ours may have gone on with another one's.
            if made.at(member.name) and not member.native and member.candidate.unavailable is None:
                return member.name
    return await request.router.responses.holder(response_id, made)


@dataclass(slots=True, eq=False)
class Conversing(Forwarding):
    api: str = ""
    peek: Peek | None = None
    model: ServedModel | None = None
    hit: PredictedHit = field(default_factory=PredictedHit)
    attempts: list[Attempt] = field(default_factory=list)
    notes: Notes | None = None  # for the request log
    _holder: str | None = None  # the replica that has the response which this one continues
    _beginning: Beginning | None = None  # of an answer that may turn out to be an error

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

    def _made(self, made: "asyncio.Future[Prompt]") -> None:
        if not made.cancelled() and not self.is_over:
            self.exchange.guard(self._place_made, made)

    def _place_made(self, made: "asyncio.Future[Prompt]") -> None:
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
            self.prompt.further_tokens = max(0, len(self._body) // BYTES_PER_TOKEN - self.prompt.tokens)

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

    def _with_kv(self, member: Member, decision: Decision, body: bytes) -> bytes:
        body = Forwarding._with_kv(self, member, decision, body)
        if self.api != RESPONSES.name or member.spec.engine not in TAKE_IDS:
            return body
        return with_id(body, new_response_id(self.admitted.cache_salt(None), member.name, self._model or ""))

    def _send(self, member: Member, decision: Decision) -> bool:
        self._beginning = None
        sent = Forwarding._send(self, member, decision)
        assert self.attempt is not None, "it is under way"
        self.attempts.append(self.attempt)
        if isinstance(self.prompt, Prompt) and self.prompt.shape is not None and not member.native:
            self.hit.verify(self.router, self.model, self.prompt, self.api, self._body)
        return sent

    # ---- the answer

    def _start(self, attempt: Attempt) -> None:
        """Start the answer; one whose KV is fetched may turn out to be an error, so it starts with its first token."""
        streams = (value_of(attempt.headers, b"content-type") or b"").startswith(CONTENT_TYPE.encode())
        if attempt.status < 400 and streams and attempt.placed.fetched_tokens:
            self._beginning = Beginning(self.api)
        else:
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
            Forwarding._start(self, attempt)
            self._beginning, body = None, held
        if not self.first_byte_s:
            self.first_byte_s = self.router.now_s()
        if (cached := last_number(body, *CACHED)) is not None:
            self.hit.reported_tokens = cached
        Forwarding.take(self, attempt, body, complete)

    def failed(self, attempt: Attempt, broken: Broken) -> None:
        """Compute the prompt there after all, if the stream broke off before a token: KV could not be read."""
        if self._beginning is not None and not broken.refused:
            self._beginning = None
            self._compute_here(attempt)
        else:
            Forwarding.failed(self, attempt, broken)

    def _over(self, exchange: Exchange) -> None:
        Forwarding._over(self, exchange)
        self.attempts, self.notes = [], None  # attempts refer to the request

    def summary(self) -> RequestSummary:
        summary = Forwarding.summary(self)
        summary.first_byte_s, summary.waited_s, summary.retries = self.first_byte_s, self.waited_s, self.retries
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
