"""A request that the router does not interpret: it goes to a replica as it came, and so does the response.

Its body is a JSON object or a form, and nothing that an engine reads in another way than the router (decision 0048).
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from itertools import islice
from urllib.parse import parse_qs

from msgspec.structs import replace

from api.errors import ApiError, invalid, quoted
from api.reading import media_type
from router.members.members import Member
from router.placement.decision import Decision
from router.placement.prompt import Prompt, Unread
from router.prompts.prompt import BYTES_PER_TOKEN, UNREADABLE, object_salted
from router.prompts.reading.client import is_quick
from router.prompts.reading.messages import Salt
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.forms import FORM, check_form
from router.proxy.headers import JSON_LINE, TO_REPLICA, length_of, request_to, value_of
from router.proxy.request import Request
from router.proxy.request_summary import RequestSummary
from router.proxy.token_report import Report
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


@dataclass(slots=True, eq=False)
class Forwarding(Request):
    caches: bool = False  # the engine may answer from its cache, so the body needs the key's salt
    only_computes: bool = False  # else its effects are unknown
    query_names_model: bool = False
    prompt: Prompt = UNREAD
    _model: str | None = None  # named in the body
    _type: bytes = b""  # the header line that says what the body is
    report: Report | None = None  # the engine's figures of its tokens

    @property
    def model_name(self) -> str | None:
        return self._model

    @property
    def _may_repeat(self) -> bool:
        return self.only_computes or self.exchange.scope["method"] in SAFE

    @property
    def _streams(self) -> bool:
        """Tell whether the first byte of the answer comes with its first token."""
        return False

    def serve(self, exchange: Exchange) -> None:
        body = self._body = exchange.take_body()
        self.came_s = self.router.now_s()
        try:
            if not is_quick(body):
                self.aside(partial(self._read_apart, body))
                return
            if body:
                self._body = self._salted(self._readable(body))
            self._make_ready()
        except ApiError as error:
            self.refuse(error)

    def _make_ready(self) -> None:
        """Place the request, now that its body has come."""
        if self.query_names_model:
            self._model = self._model_in_query()
        self.place()

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
            self._check_needs_no_salt(str(error))
            return body

    def _check_needs_no_salt(self, error: str) -> None:
        """Refuse a body without room for a salt (400) where the engine may answer from its cache."""
        if self.caches:
            path = self.exchange.scope["path"]
            why = f"this API key's cache is kept apart by a field of the body, and that of {path} is not a JSON object"
            raise invalid(f"{why} ({error}); send one, or use a key without a salt")

    def _is_ready(self) -> bool:
        self.router.members.check_served(self._model)
        return True

    def _choose(self) -> Decision:
        """Choose the least loaded replica of the model, or of all if the body names none."""
        placement = self.router.placement
        computes = self.caches and self._computes
        if computes and self.prompt is UNREAD and self._model is not None:
            self.prompt = Unread(max(1, len(self._body) // BYTES_PER_TOKEN))
        tenant = self.tenant if computes else None
        question, _ = placement.question(
            self.prompt,
            {},
            self.router.now_s(),
            tried=self.tried,
            came_s=self.came_s,
            # Its first token, by which classes go, is not known.
            tenant=None if tenant is None else replace(tenant, service=None),
        )
        return placement.decide(question, self._candidates(), policy="least-loaded")

    def _send(self, member: Member, decision: Decision) -> bool:
        attempt = self._sent(member, decision, streams=self._streams)
        self._hand_over(attempt, self._body_for(member, decision))
        return True

    def _body_for(self, member: Member, decision: Decision) -> bytes:
        return self._with_kv(member, decision, self._body)

    def _hand_over(self, attempt: Attempt, body: bytes) -> None:
        member, method = attempt.member, self.exchange.scope["method"]
        request, body = request_to(member, self.exchange, self.admitted, TO_REPLICA, self._type, body)
        bodiless, resend = method == "HEAD", method in SAFE
        attempt.sending = member.upstream.send(request, attempt, body=body, bodiless=bodiless, resend=resend)

    # ---- what the attempt tells

    def begun(self, attempt: Attempt) -> None:
        self._is_answered()
        self.router.answered(attempt)
        self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        self._start_answer(attempt, length_of(attempt.headers))

    def take(self, attempt: Attempt, body: bytes, complete: bool) -> None:
        if (report := attempt.report) is not None:  # None: it is a refusal
            self.report = report
            report.read(body)
        if complete:
            self._end_attempt(attempt)
            self.exchange.finish(body)
        elif body:
            self.exchange.send(body)
        else:
            self.exchange.flush()

    def holds(self, pending_bytes: int) -> bool:
        """Fail: only generation requests use frames."""
        raise AssertionError(f"{pending_bytes} bytes of a frame that nobody asked for")

    def used(self) -> Use:
        """The tokens as its engine reports them; embeddings and scores have a prompt, too."""
        report, decision = self.report, self.decision
        is_sent = decision is not None and decision.chosen is not None
        if self.exchange.status >= 400 or not is_sent or not self._computes:
            return NOTHING
        if report is not None and report.is_whole:
            return prompt_use(report.prompt or 0, report.cached or 0, report.tokens)
        # Its client left before the engine told: it is charged for what it has sent.
        tokens = 0 if self.prompt is UNREAD else self.prompt.tokens
        return prompt_use(tokens, 0, 0 if report is None else report.tokens)

    @property
    def _computes(self) -> bool:
        """Tell whether tokens are computed for it."""
        return not self.exchange.scope["path"].endswith(COMPUTE_NOTHING)

    def summary(self) -> RequestSummary:
        return RequestSummary(
            exchange=self.exchange,
            admitted=self.admitted,
            arrived_s=self.arrived_s,
            ended_s=self.ended_s,
            retries=self.retries,
            model=self.router.members.models.get(self._model or ""),
            used=self.used(),
        )
