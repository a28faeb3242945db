"""A request that is passed on as it came, and so is the response: of an API that only engines speak, or any other.

A conversation is placed by its prompt, as far as the router reads it. Its body is a JSON object or a form, and nothing
that an engine reads in another way than the router (decision 0048).
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from itertools import islice
from urllib.parse import parse_qs

from msgspec.structs import replace

from api.errors import ApiError, invalid, quoted
from api.generation_apis import APIS, RESPONSES, GenerationApi
from api.openai_responses.named import NamedResponses, may_name, named_in
from api.reading import media_type
from api.responses import CONTENT_TYPE
from router.members.broken import Broken
from router.members.members import Member, ServedModel
from router.placement.cost import Prompt as AnyPrompt
from router.placement.cost import Unread
from router.placement.decision import Decision
from router.prompts.canonical import MOST_TEXT_BYTES, peek_of
from router.prompts.prompt import BYTES_PER_TOKEN, UNREADABLE, Peek, Prompt, by_text, object_salted
from router.prompts.reading.client import is_quick
from router.prompts.reading.messages import Found, Salt
from router.proxy.aborts import ABORTED, is_aborted
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.figures import last_number
from router.proxy.flow import RequestType
from router.proxy.forms import FORM, check_form
from router.proxy.generation import Generation
from router.proxy.handover import Beginning
from router.proxy.headers import JSON_LINE, TO_CLIENT, TO_REPLICA, length_of, lines, value_of
from router.proxy.kept_answer import KeptAnswer, SentEvents
from router.proxy.log_notes import Notes
from router.proxy.repetition import Repetition, is_repeatable
from router.proxy.request import Request
from router.proxy.request_summary import RequestSummary
from router.proxy.response_tokens import ASK, FIELD, without_tokens
from router.proxy.responses import Made, checked, new_response_id, with_id
from router.proxy.sessions import session_of
from router.proxy.token_report import CACHED, Report
from router.proxy.token_use import prompt_use
from router.proxy.withheld import withhold
from router.tenants.limits import NOTHING, Use

UNREAD = Unread()
MOST_NAMES = 10  # of models, in an error
COMPUTE_NOTHING = ("/count_tokens", "/render")  # routes whose answers are about tokens, too
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def model_in(body: bytes | bytearray) -> str | None:
    try:
        return withhold(body, ())[1]
    except ApiError:
        return None


def _checked(request: Request, response_id: str, param: str | None = None) -> Made | None:
    """Read the id of a response; raise ApiError 404 if the response may be another tenant's."""
    has_salts = request.router.admission.has_salts
    return checked(response_id, request.admitted.cache_salt(None), param, has_salts=has_salts)


async def _holder(request: Request, response_id: str, made: Made | None) -> str | None:
    """The name of the replica that has the response; None: whichever gets the request says that it is gone."""
    if made is not None:
        for member in request.router.members:
            # Another engine keeps what it makes; a replica of ours may have gone on with another one's.
            if made.at(member.name) and not member.profile.takes_envelope and member.candidate.unavailable is None:
                return member.name
    return await request.router.responses.holder(response_id, made)


@dataclass(slots=True, eq=False)
class Forwarding(Request):
    prompt: AnyPrompt = UNREAD  # a `Prompt` as soon as a conversation is read
    peek: Peek | None = None
    report: Report | None = None  # the engine's figures of its tokens
    _model: str | None = None  # named in the body
    _type: bytes = b""  # the header line that says what the body is
    _holder: str | None = None  # the replica that has the response which it is about, or continues
    _repetition: Repetition | None = None  # of a stream that another replica could repeat
    _repeatable: bool | None = None  # None: not asked yet
    _is_background: bool = False  # whoever asked for the response was not told what was generated

    @property
    def model_name(self) -> str | None:
        return self._model

    @property
    def may_repeat(self) -> bool:
        if self._repeatable is None:
            if self.type.api:
                self._repeatable = is_repeatable(self.type.api, self._body)
            else:  # only the holder of a response knows it
                is_safe = self.exchange.scope["method"] in SAFE
                self._repeatable = (self.type.only_computes or is_safe) and not self.type.of_response
        return self._repeatable

    @property
    def _streams(self) -> bool:
        """Tell whether the first byte of the answer comes with its first token."""
        return self.peek is not None and bool(self.peek.stream)

    # ---- the body

    def serve(self, exchange: Exchange) -> None:
        """Begin with the whole body: as a generation where only replicas of ours can answer."""
        api = APIS.get(self.type.api)
        if api is not None and not self.flow.is_single and self._is_for_ours(exchange):  # a gateway sends no envelope
            if api is RESPONSES and may_name(exchange.body):
                self.aside(partial(self._generate_continued, api, exchange))
            else:
                self._generate(api, exchange)
            return
        body = self._body = exchange.take_body()
        self.came_s = self.router.now_s()
        self.flow.body()
        try:
            if not is_quick(body):
                self.aside(partial(self._read_apart, body))
                return
            if body:
                self._body = self._salted(self._readable(body))
            self._make_ready()
        except ApiError as error:
            self.refuse(error)

    def _readable(self, body: bytes) -> bytes:
        """The body without fields that only routers set; raise ApiError 400 if it may have some that are not seen."""
        headers = self.exchange.scope["headers"]
        if media_type(headers) == FORM:
            content_type = value_of(headers, b"content-type") or b""
            check_form(content_type, body, self._withheld)
            self._type = b"content-type: %b\r\n" % content_type
        else:
            body, self._model = self._withhold(body)
            self._type = JSON_LINE
        return body

    async def _read_apart(self, body: bytes) -> None:
        body = self._body = await asyncio.to_thread(self._readable, body)
        key = self.admitted.key
        if self._type is not JSON_LINE:
            self._body = self._salted(body)
        elif key is not None and key.salt is not None:
            made = await self.router.reading.read(
                body, lambda found: Salt(key.salted(found.fields.get("cache_salt"))), whole=False
            )
            if made is not None and made.body is not None:
                self._body = made.body
        self.exchange.aside = None
        self._make_ready()

    def _salted(self, body: bytes) -> bytes:
        """The body with the key's salt; any path gets it, because any may use the engine's cache."""
        key = self.admitted.key
        if key is None or key.salt is None or not body:
            return body
        try:
            return object_salted(body, key.salted)
        except UNREADABLE as error:
            if self.type.caches:
                path = self.exchange.scope["path"]
                kept_apart = "this API key's cache is kept apart by a field of the body"
                why = f"{kept_apart}, and that of {path} is not a JSON object ({error})"
                raise invalid(f"{why}; send one, or use a key without a salt") from None
            return body

    def _generate(self, api: GenerationApi, exchange: Exchange) -> None:
        self.flow.over(self.arrived_s)  # the generation takes its place
        kind = RequestType(generation=api)
        Generation(self.router, exchange, self.admitted, self.arrived_s, kind).serve(exchange)

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
        if self.type.of_response or (self.type.api == RESPONSES.name and may_name(self._body)):
            self.aside(self._find_holder)
        else:
            self._make_prompt()

    async def _find_holder(self) -> None:
        """Find the replica that holds the response which the request is about, or continues."""
        wanted: str | None
        if self.type.of_response:
            response_id = self.exchange.scope["path"].split("/")[3]  # of /v1/responses/ID, and perhaps /cancel
            wanted, made = response_id, {response_id: _checked(self, response_id)}
        else:
            named = await self._named(self._body)
            made = {response_id: _checked(self, response_id, param) for response_id, param in named}
            wanted = named.previous or named.newest
        if wanted is not None:
            self._holder = await _holder(self, wanted, made[wanted])
        self.exchange.aside = None
        self._make_prompt()

    def _make_prompt(self) -> None:
        api, body = self.type.api, self._body
        if self.type.query_names_model:
            self._model = self._model_in_query()
        if not api or not body or self._model is None:
            if api and body and self.router.config.special_tokens_in_text == "refuse":
                raise invalid("model is missing; its tokens are those that texts may not spell", "model")
            self.flow.prompted()
            return
        model = self.model = self.router.members.model(self._model)
        peek = peek_of(api, body, self._model) if is_quick(body) else None
        self.peek = peek or Peek(self._model)
        if peek is not None:
            self._draft(model, api, body, peek, peek.cache_salt)
        elif model.tokens.refuses_texts:
            self.router.in_thread(partial(self._by_text, model, self.peek, body), len(body), self._made)
        else:
            self.prompted(self._by_text(model, self.peek, body))

    def _model_in_query(self) -> str | None:
        """The model of `?model=NAME`, or the only one; raise ApiError 400 if there are several."""
        models = self.router.members.models
        query: bytes = self.exchange.scope["query_string"]
        named = parse_qs(query.decode("latin-1")).get("model")
        if named:
            return named[-1]
        if len(models) > 1:
            known = ", ".join(map(quoted, islice(models, MOST_NAMES)))
            raise invalid(f"there are several models, among them {known}; name one: ?model=NAME", "model")
        return next(iter(models), None)

    def _by_text(self, model: ServedModel, peek: Peek, body: bytes) -> Prompt:
        model.tokens.check_texts(self.type.api, body)
        return by_text(model.tokens.model, peek, model.lora, body[:MOST_TEXT_BYTES])

    def prompted(self, prompt: Prompt) -> None:
        if self.type.api == "batch":  # conversations after the first are not read, but counted by their bytes
            prompt.all_tokens = max(prompt.tokens, len(self._body) // BYTES_PER_TOKEN)
        self.prompt = prompt
        self.flow.prompted()

    # ---- what it uses

    @property
    def _computes(self) -> bool:
        """Tell whether tokens are computed for it."""
        return not (self.type.of_response or self.exchange.scope["path"].endswith(COMPUTE_NOTHING))

    def expected_use(self) -> Use | None:
        return prompt_use(self.prompt.all_tokens, self.hit.cached_tokens) if isinstance(self.prompt, Prompt) else None

    def used(self) -> Use:
        """The tokens as its engine reports them; embeddings and scores have a prompt, too."""
        report, prompt, decision = self.report, self.prompt, self.flow.decision
        if self.exchange.status >= 400:
            return NOTHING
        if self.type.of_response:  # what was generated in the background; its prompt was charged when it came
            return NOTHING if report is None or not self._is_background else prompt_use(0, 0, report.tokens)
        if not isinstance(prompt, Prompt):
            if decision is None or decision.chosen is None or not self._computes:
                return NOTHING
            if report is not None and report.is_whole:
                return prompt_use(report.prompt or 0, report.cached or 0, report.tokens)
            # Its client left before the engine told: it is charged for what it has sent.
            tokens = 0 if prompt is UNREAD else prompt.tokens
            return prompt_use(tokens, 0, 0 if report is None else report.tokens)
        if all(attempt.status >= 400 for attempt in self.attempts):
            return NOTHING
        hit = self.hit if self.prefill is None or self.prefill.outcome != "handed" else self.prefill.hit
        if report is None:
            return prompt_use(prompt.all_tokens, hit.cached_tokens)
        if self.type.api == "responses" and not report.is_whole:
            # Its first events repeat fields of the request, in which a client may have written any figures.
            return prompt_use(prompt.all_tokens, 0, report.counted)
        tokens = prompt.all_tokens if report.prompt is None else report.prompt
        return prompt_use(tokens, hit.cached_tokens, report.tokens)

    # ---- the choice

    def _is_ready(self) -> bool:
        self.router.members.check_served(self._model)
        return True

    def _choose(self) -> Decision:
        model, prompt, router = self.model, self.prompt, self.router
        if model is None or not isinstance(prompt, Prompt):
            return self._choose_unread()
        model = self.model = router.members.model(model.name)
        found = session_of(self.exchange.scope["headers"], None if self.peek is None else self.peek.prompt_cache_key)
        holder = self._living_holder
        decision = self.hit.decide(
            router,
            model,
            prompt,
            None if found is None else found.key,
            self.flow.tried,
            self.came_s,
            is_looked_up=self.type.api != "batch",  # several prompts
            only=holder if holder is not None and holder in model.members else None,
            source=None if self.prefill is None else self.prefill.source,
            tenant=self.tenant,
        )
        if router.history.request_log is not None:
            self.notes = self.notes or Notes()
            self.notes.body = self._body if router.config.log_prompts else b""
            members = [router.members.by_name[one.name] for one in decision.candidates]
            self.notes.decided(next(router.order), decision, members, router.feeds)
        return decision

    def _choose_unread(self) -> Decision:
        """Choose the least loaded replica of the model, or of all if the body names none."""
        placement = self.router.placement
        computes = self.type.caches and self._computes
        if computes and self.prompt is UNREAD and self._model is not None:
            self.prompt = Unread(max(1, len(self._body) // BYTES_PER_TOKEN))
        tenant = self.tenant if computes else None
        question, _ = placement.question(
            self.prompt,
            {},
            self.router.now_s(),
            tried=self.flow.tried,
            came_s=self.came_s,
            # Its first token, by which classes go, is not known.
            tenant=None if tenant is None else replace(tenant, service=None),
        )
        holder = self._living_holder if self.type.of_response else None
        candidates = self.router.candidates_of(self._model or "") if holder is None else [holder.candidate]
        return placement.decide(question, candidates, policy="least-loaded")

    @property
    def _living_holder(self) -> Member | None:
        """The replica that alone can answer."""
        holder = None if self._holder is None else self.router.members.by_name.get(self._holder)
        return None if holder is None or holder.name in self.flow.tried else holder

    def _computes_elsewhere(self, decision: Decision) -> bool:
        model, prompt, peek = self.model, self.prompt, self.peek
        if model is None or peek is None or not isinstance(prompt, Prompt):
            return False
        return self._prefills(decision, model, self.type.api, peek, prompt, self._body, decision.question.session)

    # ---- to a replica

    def _send(self, member: Member, decision: Decision) -> bool:
        self._beginning = None
        if self.type.api:
            if self.exchange.sent_bytes:
                assert self._repetition is not None, "else it has broken off"
                self._repetition.begin()
            else:
                resumes = member.spec.resume and self.router.config.resume
                reads = resumes and self._streams and self.type.api in APIS and self.may_repeat
                self._repetition = Repetition(self.type.api, self._ends) if reads else None
        attempt = self.record_sent(member, decision, streams=self._streams)
        body, resend = self._body_for(member, decision), self.exchange.scope["method"] in SAFE
        self.transport.send(
            self.exchange, self.admitted, decision, attempt, TO_REPLICA, self._type, body, resend=resend
        )
        if isinstance(self.prompt, Prompt) and self.prompt.shape is not None and not member.profile.takes_envelope:
            self.hit.verify(self.router, self.model, self.prompt, self.type.api, self._body)
        return True

    @property
    def _ends(self) -> frozenset[int]:
        """The tokens that end an answer of the model; empty: they are not known."""
        prompts = None if self.model is None else self.model.tokens.prompts
        if prompts is None:
            return frozenset()
        return prompts.tokenizer.special_token_ids.union(prompts.tokenizer.eos_token_ids)

    def _asks_tokens(self, member: Member) -> bool:
        """Return whether only tokens can tell if this replica has given the answer up."""
        asks = self.type.api == RESPONSES.name and member.profile.hides_aborts and member.spec.resume
        return asks and self.router.config.resume and FIELD not in self._body and bool(self._ends) and self.may_repeat

    def _body_for(self, member: Member, decision: Decision) -> bytes:
        body = self._with_kv(member, decision, self._body)
        if self.type.api != RESPONSES.name or not member.profile.names_responses:
            return body
        again = self._repetition.response_id if self._repetition is not None else ""
        salt = self.admitted.cache_salt(None)
        # What is repeated is kept under the id that the client has.
        body = with_id(body, again or new_response_id(salt, member.name, self._model or ""))
        return body.rstrip()[:-1] + ASK + b"}" if self._asks_tokens(member) else body

    # ---- the answer

    def begun(self, attempt: Attempt) -> None:
        self.flow.head()
        self.router.answered(attempt)
        is_kept = self.type.api and not self._streams and self.may_repeat
        if not self.exchange.response_started and not is_kept:
            self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        """Start the answer; one whose KV is fetched may turn out to be an error, so it starts with its first token."""
        streams = (value_of(attempt.headers, b"content-type") or b"").startswith(CONTENT_TYPE.encode())
        if attempt.status < 400 and streams and attempt.placed.fetched_tokens:
            self._beginning = Beginning(self.type.api)
        else:
            self._open(attempt, streams)

    def _open(self, attempt: Attempt, streams: bool) -> None:
        api, length = APIS.get(self.type.api), length_of(attempt.headers)
        if api is not None and streams and attempt.status < 400 and length is None and not self.flow.is_single:
            self._events = SentEvents(api)
        self._start_answer(attempt, length)

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        if self.type.of_response:
            self._is_background |= b'"background":true' in body
        elif self.type.api:
            if body:
                self.router.computed(attempt)
            if self._beginning is not None:
                held = self._begin_fetched(attempt, self._beginning, body, complete)
                if held is None:
                    return
                body = held
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
            if (cached := last_number(body, *CACHED)) is not None:
                self.hit.reported_tokens = cached
            if lost is not None:
                differs = self._repetition is not None and self._repetition.why_not == lost
                self._lose(attempt, body, Broken(lost, ours=differs))  # which is no fault of the replica
                return
        if (report := attempt.report) is not None:  # None: it is a refusal
            self.report = report
            report.read(body)
        if complete:
            self.end_attempt()
            self.exchange.finish(body)
        elif body:
            self.exchange.send(body)
        else:
            self.exchange.flush()
        if self._events is not None and body:
            self._events.note(body)

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
        if complete and (given_up or is_aborted(self.type.api, body, attempt.member.profile)):
            self._lose(attempt, b"", Broken(ABORTED))
            return
        if complete:
            self.end_attempt()
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
            Request.failed(self, attempt, broken)

    def _why_not_resumed(self) -> str | None:
        if not self.type.api or not self.may_repeat:
            return "its answer has begun"
        if not self.exchange.sent_bytes:
            return None if self._events is not None else "its answer has begun"
        return "the client has a part of it" if self._repetition is None else self._repetition.why_not

    def summary(self) -> RequestSummary:
        summary = RequestSummary(
            exchange=self.exchange,
            admitted=self.admitted,
            arrived_s=self.arrived_s,
            ended_s=self.ended_s,
            retries=self.flow.retries,
            model=self.model or self.router.members.models.get(self._model or ""),
            used=self.used(),
        )
        if self.type.api:
            summary.first_byte_s, summary.waited_s, summary.why = self.first_byte_s, self.flow.waited_s, self.why
            summary.output_tokens = None if self.report is None else self.report.generated
            summary.attempts, summary.notes = self.attempts, self.notes
            summary.prefill = None if self.prefill is None else self.prefill.summary()
        if self.flow.decision is not None and self.peek is not None and isinstance(self.prompt, Prompt):
            summary.generation = self.hit.summary(self.peek, self.prompt, self.flow.decision)
        return summary
