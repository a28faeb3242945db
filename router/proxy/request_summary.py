"""The summary of a finished request, for metrics, logs, traces and the list of decisions."""

import time
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from api.http.prometheus import Histogram
from router.members.predictions import Predictions
from router.members.tally import DECISION_S, Tally
from router.placement.cost import INFINITE
from router.placement.decision import Decision
from router.placement.holders import Gone
from router.prompts.prompt import is_billed
from router.responses import Considered, DecisionRecord, PrefillRecord
from router.tenants.limits import NOTHING, Use
from router.tenants.usage import ClassTotals, Counts

if TYPE_CHECKING:
    from router.members.members import ServedModel
    from router.proxy.attempt import Attempt
    from router.proxy.exchange import Exchange
    from router.proxy.predicted_hit import PredictedHit, PrefillHalf
    from router.tenants.admission import Admitted


class RequestSummary(Struct, eq=False, kw_only=True, gc=False):
    exchange: "Exchange"
    admitted: "Admitted"
    arrived_s: float
    ended_s: float
    first_byte_s: float = 0.0  # 0: none has come
    waited_s: float = 0.0  # for room
    retries: int = 0
    resumes: int = 0
    why: str = ""  # the reason if it was not answered completely
    chat: bool | None = None  # None: it is no generation request
    model: "ServedModel | None" = None
    generation: "PredictedHit | None" = None  # None: no replica was looked for by its prompt
    attempts: "Sequence[Attempt]" = ()
    prefill: "PrefillHalf | None" = None  # None: no other place for its prompt was weighed
    logged: bytes = b""  # the body, for the request log
    used: Use = NOTHING  # tokens, as the key is charged
    output_tokens: int | None = None  # without those that nobody but their number of events tells of
    trace: Any = None  # router.records.tracing.RequestTrace, whose package is an extra; None: not traced
    duration_s: float = 0.0  # made of the times above, as is the next
    ttft_s: float | None = None
    is_broken: bool = False  # it began well and did not come to its end, by no fault of the client

    def __post_init__(self) -> None:
        self.duration_s = self.ended_s - self.arrived_s
        self.is_broken = bool(self.why) and self.exchange.status < 400
        if self.first_byte_s:
            self.ttft_s = self.first_byte_s - self.arrived_s


# ---- counting


class RequestCounts:
    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # keyed by the error's code
        self.approximate: Counter[str] = Counter()  # keyed by reason
        self.retries = 0
        self.resumes = 0
        self.client_left = 0
        self.decision_s = Histogram(DECISION_S)
        self.classes = ClassTotals()


def count_request(tally: Tally, summary: RequestSummary, generation: "PredictedHit") -> None:
    """Count a finished request in the tally of its model at its replica."""
    member, prompt = generation.member, generation.prompt
    assert member is not None, "it is one of its tallies"
    status = summary.exchange.status
    tally.statuses[status] = tally.statuses.get(status, 0) + 1
    tally.broken += summary.is_broken
    tally.request_s.observe(summary.duration_s)
    if (ttft_s := summary.ttft_s) is not None:
        tally.first_token_s.observe(ttft_s)
    tally.prompt_tokens += prompt.all_tokens
    matched = generation.decision.question.matched
    tally.matched_tokens += int(matched.get(member.slot, 0))
    tally.held_tokens += int(max(matched.values(), default=0))
    tally.billed += is_billed(generation.prompt.peek)
    if cached := summary.used.cached:
        tally.cached_tokens += cached
        tally.saved_s += _saved_s(summary, generation)
    if prompt.salt is not None:
        tally.sent((prompt.peek.model, prompt.salt))
    predicted, reported_tokens = generation.prediction, generation.reported_tokens
    if predicted is not None and reported_tokens is not None and generation.is_comparable and not summary.resumes:
        tally.reported_blocks += reported_tokens // predicted.block_size
        tally.compared_tokens += prompt.tokens


def count_prefill(tally: Tally, summary: RequestSummary, hit: "PredictedHit", keys: list[int], gone: Gone) -> None:
    """Count the tokens that the replica has computed, the last of the prompt, by what was known of their blocks."""
    computed, predicted, member = summary.used.computed, hit.prediction, hit.member
    if predicted is None or member is None or not hit.is_comparable or summary.resumes:
        tally.unknown_tokens += computed
        return
    tokens, size, claimed = hit.prompt.tokens, predicted.block_size, predicted.tokens
    begin, usable = tokens - computed, (tokens - 1) // size * size
    if begin >= usable:  # the rest of a prompt is always computed
        tally.new_tokens += computed
        return
    levels = hit.decision.question.matched, *hit.decision.question.below.values()
    held, elsewhere = max(claimed, *(max(level.values(), default=0) for level in levels)), 0.0
    if begin < claimed and member.feed is not None and hit.predicted_at is not None:
        missing = keys[max(0, begin) // size :][:1]
        if member.feed.has_changed(hit.predicted_at, missing, stored=False):  # evicted before it was the prompt's turn
            claimed = 0
    if held > max(begin, claimed):
        others = zip(hit.decision.candidates, hit.decision.costs, strict=True)
        unable = {member.slot, *(one.slot for one, cost in others if cost == INFINITE)}
        elsewhere = max((found for level in levels for slot, found in level.items() if slot not in unable), default=0.0)
    at = int(max(begin, held))
    known, kept = gone.leading(keys[at // size : usable // size], member.load.total_blocks)
    evicted = max(at, (at // size + known) * size)
    tally.kept_tokens += min(kept * size, evicted - at)
    tally.computed(computed, tokens, claimed, min(usable, int(elsewhere)), min(usable, evicted))


def compare(predictions: Predictions, summary: RequestSummary, generation: "PredictedHit", keys: list[int]) -> None:
    """Compare the reported with the predicted cached blocks, if the report says as much."""
    member, predicted, reported_tokens = generation.member, generation.prediction, generation.reported_tokens
    since = generation.predicted_at
    if member is None or since is None or not generation.is_comparable or summary.resumes:
        return
    assert predicted is not None and reported_tokens is not None, "they are compared"
    reported_blocks = reported_tokens // predicted.block_size
    sure = generation.prompt.exact and generation.prompt.doubt is None
    predictions.compare(
        member.name, member.accuracy, member.feed, predicted, since, reported_blocks, keys, summary.ended_s, sure=sure
    )


def count_usage(counts: Counts, summary: RequestSummary) -> None:
    status, (_, computed, cached, generated) = summary.exchange.status, summary.used
    counts.requests += 1
    counts.computed_tokens += computed
    counts.cached_tokens += cached
    counts.generated_tokens += generated
    if status >= 400:
        counts.client_errors += status < 500
        counts.server_errors += status >= 500
    else:
        counts.server_errors += summary.is_broken
        if (ttft_s := summary.ttft_s) is not None:
            counts.first_tokens += 1
            counts.first_token_s += ttft_s
    if cached and summary.generation is not None:
        counts.saved_s += _saved_s(summary, summary.generation)


def _saved_s(summary: RequestSummary, generation: "PredictedHit") -> float:
    """Seconds of prefill that the cache has saved, at the replica's speed; 0 while that is unknown."""
    speed = 0.0 if generation.member is None else generation.member.candidate.prefill_tokens_per_s
    return summary.used.cached / speed if speed else 0.0


# ---- the list of decisions


def prefill_record(prefill: "PrefillHalf") -> PrefillRecord:
    found, half = prefill.split, prefill.hit
    predicted = None if half is None else half.prediction
    assert found is not None, "something was weighed"
    names = ("here_s", "here_harm_s", "there_s", "there_harm_s", "transfer_s")
    weighed: dict[str, Any] = {name: round(getattr(found, name), 6) for name in names}
    return PrefillRecord(
        elsewhere=found.elsewhere,
        why=found.why,
        replica=found.replica,
        outcome=prefill.outcome,
        **weighed,
        duration_s=round(prefill.duration_s, 6),
        predicted_cached_tokens=None if predicted is None else predicted.tokens,
        reported_cached_tokens=None if half is None else half.reported_tokens,
    )


class PastDecision(Struct, frozen=True, gc=False):
    """A decision whose request is over. What takes a look at each candidate is told on demand, from references."""

    outcome: DecisionRecord  # the part that the decision does not say
    decision: Decision
    harms_s: "array[float] | None" = None  # parallel to the candidates: 4 bytes each, where effects have three lists

    def record(self, *, briefly: bool = False) -> DecisionRecord:
        """Complete the record; `briefly`: without its candidates, of which there may be a thousand."""
        decision, question, outcome = self.decision, self.decision.question, self.outcome
        tenant = question.tenant
        candidates = zip(() if briefly else decision.candidates, self.harms_s or repeat(0.0), strict=False)
        return replace(
            outcome,
            policy=decision.policy,
            estimated_ttft_s=round(decision.ttft_s, 6),
            ttft_s=None if outcome.ttft_s is None else round(outcome.ttft_s, 6),
            duration_s=round(outcome.duration_s, 6),
            waited_s=round(outcome.waited_s, 6),
            candidates=[
                Considered(
                    one.name,
                    int(question.matched.get(one.slot, 0)),
                    None if decision.costs[index] == INFINITE else round(decision.costs[index], 6),
                    decision.parts_of(index, harm_s),
                )
                for index, (one, harm_s) in enumerate(candidates)
            ],
            session=question.session,
            portions=decision.chosen_portions,
            service_class=None if tenant is None or tenant.service is None else tenant.service.name,
            behind_s=round(question.behind_s, 6),
        )


def past_decision(summary: RequestSummary, generation: "PredictedHit") -> PastDecision:
    decision, predicted, exact = generation.decision, generation.prediction, generation.exactness
    outcome = DecisionRecord(
        ts=time.time(),
        request_id=summary.admitted.request_id,
        model=generation.prompt.peek.model,
        chosen=None if generation.member is None else generation.member.name,
        prompt_tokens=generation.prompt.all_tokens,
        exact=exact.tokens,
        predicted_cached_tokens=None if predicted is None else predicted.tokens,
        reported_cached_tokens=generation.reported_tokens,
        ttft_s=summary.ttft_s,
        duration_s=summary.duration_s,
        waited_s=summary.waited_s,
        retries=summary.retries,
        resumes=summary.resumes,
        status=summary.exchange.status,
        why=summary.why or None,
        tokens_exact=exact.tokens,
        index_exact=exact.index,
        prediction_exact=exact.prediction,
        why_inexact=exact.why_not,
        prefill=None if summary.prefill is None else prefill_record(summary.prefill),
    )
    # The costs include the effects.
    if decision.effects is None:
        return PastDecision(outcome, decision)
    return PastDecision(outcome, replace(decision, effects=None), decision.harms_s())
