"""A logged decision beside its replay, and the kind of difference between them."""

from collections.abc import Sequence
from math import isclose
from typing import Literal, TypeAlias

from msgspec import Struct

from router.log_lines import Decided, Weighed
from router.placement.cost import INFINITE, Candidate
from router.placement.decision import Decision

# If several apply, the earlier one counts: the known caches influence more figures than the known queues do.
Kind: TypeAlias = Literal["events", "expected", "load", "logic", "policy"]
KINDS: dict[Kind, str] = {
    "events": "other events were known then than the recording has up to there",
    "expected": "other blocks counted as cached, though the same events were known",
    "load": "queues or rates were others",
    "logic": "the figures are the same, and yet the choice is another one: the code has changed",
    "policy": "as the other policy wants it",
}
CLOSE = 1e-6  # relative; both compute in the same order, except where a status's time decides
SOME_TOKENS = 0.5


class Figures(Struct, frozen=True):
    matched_tokens: float
    queued_tokens: float
    busy: int
    prefill_tokens_per_s: float
    empty_tokens: float | None
    assigned_tokens: float
    cost_s: float | None
    seq: int | None  # the last batch of its events


class Beside(Struct, frozen=True):
    name: str
    logged: Figures
    replayed: Figures

    @property
    def has_other_matches(self) -> bool:
        return abs(self.logged.matched_tokens - self.replayed.matched_tokens) > SOME_TOKENS

    @property
    def has_other_load(self) -> bool:
        one, other = self.logged, self.replayed
        rate = not isclose(one.prefill_tokens_per_s, other.prefill_tokens_per_s, rel_tol=CLOSE)
        tokens = (
            (one.queued_tokens, other.queued_tokens),
            (one.empty_tokens or 0, other.empty_tokens or 0),
            (one.assigned_tokens, other.assigned_tokens),
        )
        return rate or one.busy != other.busy or any(abs(left - right) > SOME_TOKENS for left, right in tokens)


class Difference(Struct, frozen=True):
    """A decision with another outcome in the replay than in the log."""

    request_id: str
    ts: float
    logged: str | None
    replayed: str | None
    kind: Kind
    candidates: list[Beside]


def beside(decided: Decided, decision: Decision, seqs: Sequence[int | None]) -> list[Beside]:
    question = decision.question
    return [
        Beside(
            one.name,
            _figures(one, one.matched_tokens, one.cost_s, one.seq),
            _figures(candidate, question.matched.get(candidate.slot, 0), None if cost == INFINITE else cost, seq),
        )
        for one, candidate, cost, seq in zip(decided.candidates, decision.candidates, decision.costs, seqs, strict=True)
    ]


def kind_of(sides: Sequence[Beside]) -> Kind:
    matched = [side for side in sides if side.has_other_matches]
    if any(side.logged.seq != side.replayed.seq for side in matched):
        return "events"
    if matched:
        return "expected"
    return "load" if any(side.has_other_load for side in sides) else "logic"


def _figures(one: Weighed | Candidate, matched_tokens: float, cost_s: float | None, seq: int | None) -> Figures:
    return Figures(
        matched_tokens=matched_tokens,
        queued_tokens=one.queued_tokens,
        busy=max(one.running, one.in_flight),
        prefill_tokens_per_s=one.prefill_tokens_per_s,
        empty_tokens=one.empty_tokens,
        assigned_tokens=one.assigned_tokens,
        cost_s=cost_s,
        seq=seq,
    )
