"""The hit that is expected at the replica chosen for a prompt, and the one that its engine reports."""

from time import perf_counter

from msgspec import Struct

from engines.prompts.dates import SHOWS_DATE
from router.members.feed import Moment
from router.members.members import Member, ServedModel
from router.placement.classes import Outlook
from router.placement.cost import Tenant
from router.placement.decision import Decision, Prediction, predict
from router.prompts.prompt import Peek, Prompt
from router.prompts.shapes import NOT_THERE
from router.proxy.attempt import Report
from router.proxy.request_summary import GenerationSummary, exactness
from router.proxy.services import Services


class PredictedHit(Struct, eq=False):
    member: Member | None = None  # the last choice
    prediction: Prediction | None = None  # its cached blocks there; None: only guessed, or not looked for
    predicted_at: Moment | None = None  # the moment in the replica's stream
    index_doubt: str | None = None  # why the index may have differed from the replica's cache
    reported_tokens: int | None = None
    outlook: Outlook | None = None  # its expected beginning; None: it has no class

    def decide(
        self,
        router: Services,
        model: ServedModel,
        prompt: Prompt,
        session: str | None,
        tried: frozenset[str],
        came_s: float,
        *,
        is_looked_up: bool,
        only: Member | None = None,
        source: Member | None = None,
        tenant: Tenant | None = None,
    ) -> Decision:
        """Choose a replica, and predict the hit there; `is_looked_up`: its engine will look for one.

        `source`: the replica that holds the prompt's KV for another one.
        """
        started = perf_counter()
        away = tried if source is None else tried | source.server.names
        decision, matches = router.decide(model, prompt, session, away, came_s, only=only, source=source, tenant=tenant)
        if decision.chosen is None and source is not None:  # it may generate the answer itself
            decision, matches = router.decide(model, prompt, session, tried, came_s, only=only, tenant=tenant)
        router.history.counts.decision_s.observe(perf_counter() - started)
        if decision.chosen is not None:
            member = self.member = router.members.by_name[decision.chosen.name]
            self.prediction = self.predicted_at = None
            if is_looked_up and prompt.exact and not decision.question.is_fetched:  # else it is reported elsewhere
                self.prediction = predict(prompt, decision, member.block_size, matches)
                self.predicted_at = None if self.prediction is None else router.feeds.moment(member.name)
            self.index_doubt = router.doubt(member)
        return decision

    def verify(self, router: Services, model: ServedModel | None, prompt: Prompt, api: str, body: bytes) -> None:
        """Have the request's shape verified at a foreign replica where it is not; nothing is predicted until then."""
        member = self.member
        assert model is not None and member is not None, "the prompt is of this model, and on its way"
        if model.tokens.is_verified_at(prompt, member.server.process):
            return
        if prompt.doubt in (NOT_THERE, SHOWS_DATE):
            self.prediction = None
        if router.verification is not None:
            router.verification.sent(member, model, prompt, api, body)

    def told(self, router: Services, model: ServedModel | None, prompt: Prompt, member: Member, report: Report) -> None:
        """Note the engine's report of its cached tokens."""
        self.reported_tokens = report.cached
        verification = router.verification
        # Comparing the prompt's length costs nothing, and covers every field of the request.
        if prompt.shape is None or not prompt.exact or len(prompt.packed) > 1 or model is None or verification is None:
            return
        if report.prompt is not None and report.prompt != prompt.tokens:
            verification.other_length(member, model.tokens, prompt, report.prompt)
            self.prediction = None  # it was made for other tokens, so it tells nothing of the index

    @property
    def cached_tokens(self) -> int:
        """The tokens that the replica had cached: as it reports, else as was predicted."""
        if self.reported_tokens is not None:
            return self.reported_tokens
        return 0 if self.prediction is None else self.prediction.blocks * self.prediction.block_size

    def summary(self, peek: Peek, prompt: Prompt, decision: Decision) -> GenerationSummary:
        return GenerationSummary(
            peek,
            prompt,
            decision,
            self.member,
            self.prediction,
            self.reported_tokens,
            exactness(prompt, self.prediction, self.index_doubt),
            self.predicted_at,
        )
