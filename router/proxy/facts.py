"""The facts of one request, the choice of a replica by them, and the tokens that it has used."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from msgspec.structs import replace

from api.generation_apis import RESPONSES
from router.members.members import Member, ServedModel
from router.placement.classes import chosen
from router.placement.cost import NONE_TRIED, Tenant, Unread
from router.placement.cost import Prompt as AnyPrompt
from router.placement.decision import Decision, predict
from router.placement.elsewhere import fetch
from router.placement.index import Matches
from router.prompts.prompt import BYTES_PER_TOKEN, Peek, Prompt
from router.proxy.attempt import Attempt, Report
from router.proxy.exchange import Exchange
from router.proxy.flow import Flow, RequestType
from router.proxy.headers import DIRECT, NAMES_OF_SESSION, Transport, session_of
from router.proxy.predicted_hit import PredictedHit, PrefillHalf
from router.proxy.services import Services
from router.proxy.withheld import PLACING, PRIORITY, WITHHELD
from router.tenants.admission import Admitted
from router.tenants.keys import Key
from router.tenants.limits import NOTHING, Use

UNREAD = Unread()
MAX_TENANT_BYTES = 100  # the limit for a name that a gateway gives
COMPUTE_NOTHING = ("/count_tokens", "/render")  # routes whose answers are about tokens, too
_UNSET: Any = None  # stands for a part that is set later


@dataclass(slots=True, eq=False)
class RequestFacts:
    router: Services
    exchange: Exchange
    admitted: Admitted
    arrived_s: float
    type: RequestType
    transport: Transport = DIRECT
    flow: Flow = _UNSET
    # `reading` finds these in the body:
    came_s: float = 0.0  # all of it
    body: bytes = b""
    type_line: bytes = b""  # an opaque body's own
    model_name: str | None = None  # the model that its replica has to serve; None: any replica will do
    model: ServedModel | None = None
    peek: Peek = _UNSET  # set if its prompt is read
    prompt: AnyPrompt = UNREAD  # a `Prompt` as soon as it is read
    streams: bool = False
    session: str | None = None
    within: str | None = None  # the session that has begun this one
    priority: int | None = None  # the client's wish, where the router is to obey it
    holder: str | None = None  # the replica that has the response which it is about, or continues
    may_repeat: bool = False  # several replicas may answer it, of which one is heard: it has no other effect
    may_resume: bool = False  # a replica may go on with another one's answer
    # These change on its way:
    attempt: Attempt | None = None  # the one under way
    attempts: list[Attempt] = field(default_factory=list)
    hit: PredictedHit = field(default_factory=PredictedHit)
    half: PrefillHalf | None = None  # None: its prompt is computed where its answer is generated
    first_byte_s: float = 0.0
    report: Report | None = None  # the figures of the engine that answers, where it tells them
    is_background: bool = False  # whoever asked for the response was not told what was generated
    logged: bytes = b""  # its body, kept for the request log
    trace: Any = None  # router.records.tracing.RequestTrace, whose package is an extra; None: not traced
    why: str = ""  # it ended without an answer

    @property
    def withheld(self) -> tuple[str, ...]:
        """The fields that only the router may set."""
        names = PLACING if self.router.config.pass_kv_transfer_params else WITHHELD
        key = self.admitted.key
        return (*names, PRIORITY) if key is not None and key.classes else names

    def reads(self, peek: Peek) -> ServedModel:
        """Note what was read of its body; raise ApiError if no replica serves its model."""
        self.peek, self.model_name, self.streams = peek, peek.model, bool(peek.stream)
        headers, cache_key = self.exchange.scope["headers"], peek.prompt_cache_key
        self.session = self.within = None  # few have one
        if cache_key is not None or not NAMES_OF_SESSION.isdisjoint(dict(headers)):
            session = session_of(headers, cache_key)
            if session is not None:
                self.session, self.within = session.key, session.within
        members = self.router.members
        model = self.model = members.models.get(peek.model) or members.model(peek.model)
        return model

    @property
    def computes(self) -> bool:
        return not (self.type.of_response or self.exchange.scope["path"].endswith(COMPUTE_NOTHING))

    @property
    def exact_tokens(self) -> int:
        """The prompt's length, to exclude replicas that are too small; 0 if it is not exact."""
        return self.prompt.tokens if self.prompt.exact else 0

    def end_attempt(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            self.router.attempt_over(attempt)

    def told(self, member: Member, report: Report) -> None:
        hit, prompt, model = self.hit, self.prompt, self.model
        verification, hit.reported_tokens = self.router.verification, report.cached
        # Comparing the prompt's length costs nothing, and covers every field of the request.
        if not isinstance(prompt, Prompt) or prompt.shape is None or not prompt.exact or len(prompt.packed) > 1:
            return
        if verification is not None and model is not None and report.prompt not in (None, prompt.tokens):
            verification.other_length(member, model.tokens, prompt, report.prompt)
            hit.prediction = None  # it was made for other tokens, so it tells nothing of the index


# ---- the choice of a replica for it, with what is expected there


def decide(
    router: Services,
    model: ServedModel,
    prompt: Prompt,
    session: str | None,
    tried: frozenset[str] = NONE_TRIED,
    came_s: float | None = None,
    *,
    only: Member | None = None,
    source: Member | None = None,
    tenant: Tenant | None = None,
    within: str | None = None,
) -> tuple[Decision, dict[int, Matches]]:
    """The choice for a prompt, and by block size the blocks of it that match. `only`: no other replica will do.

    `source`: the replica that has computed its KV for another one.
    """
    placement, slots = router.placement, model.slots if prompt.exact else model.all_slots
    placement.shares.others_may_come = router.admission.has_tenants
    question, matches = placement.question(
        prompt,
        slots,
        router.now_s(),
        session=session,
        within=within,
        model=model.base if only is None and source is None else "",
        tried=tried,
        came_s=came_s,
        counts=source is None,
        tenant=tenant,
        further_tokens=prompt.all_tokens - prompt.tokens,
    )
    if source is not None:
        fetch(question, model.candidates, source.candidate)
    ring = model.ring if router.config.policy == "session" and only is None else None
    return placement.decide(question, model.candidates if only is None else [only.candidate], ring), matches


def choose(facts: RequestFacts, source: Member | None) -> Decision:
    """The best replica for its prompt. `source`: the one that holds the prompt's KV for another one."""
    model, prompt, router, api = facts.model, facts.prompt, facts.router, facts.type.generation
    if model is None or not isinstance(prompt, Prompt):
        return _choose_unread(facts)
    if api is None:
        model = facts.model = router.members.model(model.name)
    is_looked_up = prompt.exact and (api is None or not facts.peek.skips_cache(api.is_chat))
    holder = None if facts.holder is None else _living_holder(facts)
    only = holder if holder is not None and holder in model.members else None
    tenant = None if facts.admitted.key is None else _tenant(facts, facts.admitted.key)
    started, session, tried, came_s = perf_counter(), facts.session, facts.flow.tried, facts.came_s
    away = tried if source is None else tried | source.server.names
    asked = session, away, came_s
    decision, matches = decide(
        router, model, prompt, *asked, only=only, source=source, tenant=tenant, within=facts.within
    )
    if decision.chosen is None and source is not None:  # it may generate the answer itself
        decision, matches = decide(router, model, prompt, session, tried, came_s, only=only, tenant=tenant)
    router.history.counts.decision_s.observe(perf_counter() - started)
    hit = facts.hit
    hit.prompt, hit.decision = prompt, decision
    if decision.chosen is not None:
        member = hit.member = router.members.by_name[decision.chosen.name]
        hit.prediction = hit.predicted_at = None
        if is_looked_up and not decision.question.is_fetched:  # else it is reported elsewhere
            hit.prediction = predict(prompt, decision, member.block_size, matches)
            hit.predicted_at = None if hit.prediction is None or member.feed is None else member.feed.moment()
        hit.index_doubt = router.doubt(member)
    if api is None and router.config.log_prompts:
        facts.logged = facts.body
    return decision


def _choose_unread(facts: RequestFacts) -> Decision:
    """Choose the least loaded replica of the model, or of all if the body names none."""
    router, tenant = facts.router, None
    if facts.type.caches and facts.computes:
        if facts.prompt is UNREAD and facts.model_name is not None:
            facts.prompt = Unread(max(1, len(facts.body) // BYTES_PER_TOKEN))
        if (key := facts.admitted.key) is not None:
            tenant = replace(_tenant(facts, key), service=None)  # its first token, by which classes go, is not known
    tried, came_s = facts.flow.tried, facts.came_s
    question, _ = router.placement.question(facts.prompt, {}, router.now_s(), tried=tried, came_s=came_s, tenant=tenant)
    holder = _living_holder(facts) if facts.type.of_response else None
    candidates = router.candidates_of(facts.model_name or "") if holder is None else [holder.candidate]
    return router.placement.decide(question, candidates, policy="least-loaded")


def _living_holder(facts: RequestFacts) -> Member | None:
    holder = None if facts.holder is None else facts.router.members.by_name.get(facts.holder)
    return None if holder is None or holder.name in facts.flow.tried else holder


def _tenant(facts: RequestFacts, key: Key) -> Tenant:
    """Return the party whose share of the replicas it takes."""
    service = None
    if key.classes:
        is_read = facts.type.generation is not None
        service = chosen(key.classes, facts.peek.service_tier, facts.priority) if is_read else key.classes[0]
    name = key.name
    if key.tenant_header is not None:
        value = dict(facts.exchange.scope["headers"]).get(key.tenant_header, b"")
        name = f"{name}/{value[:MAX_TENANT_BYTES].decode('latin-1')}"
    return Tenant(name, facts.model_name or "", key.weight, service)


# ---- the tokens that it has used so far, as its key is charged


def used(facts: RequestFacts) -> tuple[Use, int | None]:
    """The charged tokens, and the generated ones without those that nobody but their number of events tells of.

    The generated ones are all attempts'; the prompt's are those of the replica that has told most of it, if one tells.
    """
    prompt, attempts, half, report = facts.prompt, facts.attempts, facts.half, facts.report
    hit = facts.hit if half is None or half.outcome != "handed" else half.at_replica
    is_refused = facts.exchange.status >= 400
    if facts.type.generation is None:
        return NOTHING if is_refused else _opaque(facts, hit), None if report is None else report.generated
    generated, output, told = 0, None, None
    for attempt in attempts:
        own = attempt.counted_tokens if attempt.ended_s else attempt.tokens
        generated += own
        if attempt.framed or (attempt.report is not None and attempt.report.generated is not None):
            output = own if output is None else output + own
        if attempt.told is not None and (told is None or attempt.told.choices > told.choices):
            told = attempt.told  # what others computed before they were lost is not charged
    if (is_refused and not generated) or not isinstance(prompt, Prompt) or not attempts:
        return NOTHING, output
    if attempts[-1].status >= 400 and all(attempt.status >= 400 for attempt in attempts):
        return NOTHING, output  # none took it
    if told is not None:
        facts.hit.reported_tokens = told.cached
        tokens = told.computed + told.cached
        if told.choices < prompt.choices:  # how much of the others was computed is not known
            tokens = max(tokens, prompt.all_tokens)
        return prompt_use(tokens, told.cached, generated), output
    last = None if facts.flow.resumes else attempts[-1].report
    tokens = prompt.all_tokens if last is None or last.prompt is None else last.prompt
    cached = min(hit.cached_tokens, tokens)
    return Use(0, tokens - cached, cached, generated), output


def _opaque(facts: RequestFacts, hit: PredictedHit) -> Use:
    """The tokens of what is passed on as it comes, as its engine reports them."""
    prompt, report, decision = facts.prompt, facts.report, facts.flow.decision
    if facts.type.of_response:  # only a background answer is charged here; its prompt was when it came
        return NOTHING if report is None or not facts.is_background else prompt_use(0, 0, report.tokens)
    if not isinstance(prompt, Prompt):  # embeddings and scores have a prompt, too
        if decision is None or decision.chosen is None or not facts.computes:
            return NOTHING
        if report is not None and report.is_whole:
            return prompt_use(report.prompt or 0, report.cached or 0, report.tokens)
        # Its client left before the engine told: it is charged for what it has sent.
        return prompt_use(0 if prompt is UNREAD else prompt.tokens, 0, 0 if report is None else report.tokens)
    if all(attempt.status >= 400 for attempt in facts.attempts):
        return NOTHING
    if report is None:
        return prompt_use(prompt.all_tokens, hit.cached_tokens)
    if facts.type.api == RESPONSES.name and not report.is_whole:
        # Its first events repeat fields of the request, in which a client may have written any figures.
        return prompt_use(prompt.all_tokens, 0, report.counted)
    return prompt_use(prompt.all_tokens if report.prompt is None else report.prompt, hit.cached_tokens, report.tokens)


def prompt_use(tokens: int, cached: int, generated: int = 0) -> Use:
    cached = min(cached, tokens)
    return Use(0, tokens - cached, cached, generated)
