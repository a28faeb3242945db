"""What is remembered of a decision, without a word of the prompt."""

from msgspec import Struct

from router.placement.cost import INFINITE
from router.placement.policy import Decision


class Considered(Struct, frozen=True):
    """One replica in a decision."""

    name: str
    matched_tokens: int
    cost_s: float | None  # None: it could not take the request


class Record(Struct, frozen=True):
    ts: float
    request_id: str
    model: str
    policy: str
    chosen: str | None
    prompt_tokens: int
    exact: bool
    predicted_cached_tokens: int | None
    reported_cached_tokens: int | None
    estimated_ttft_s: float | None
    ttft_s: float | None
    duration_s: float
    waited_s: float
    retries: int
    resumes: int
    status: int
    why: str | None  # it was not answered
    candidates: list[Considered]


class Remembered(Struct, frozen=True, gc=False):
    """What a record is made of when somebody asks: for every request only references are kept."""

    ts: float
    routing_s: tuple[float, float, float, float]  # arrived, first byte (0: none), ended, waited
    request_id: str
    model: str
    chosen: str | None
    tokens: int
    exact: bool
    decision: Decision
    predicted_tokens: int | None
    reported_tokens: int | None
    retries: int
    resumes: int
    status: int
    why: str

    def record(self) -> Record:
        decision = self.decision
        matched = decision.question.matched
        arrived_s, first_s, ended_s, waited_s = self.routing_s
        return Record(
            ts=self.ts,
            request_id=self.request_id,
            model=self.model,
            policy=decision.policy,
            chosen=self.chosen,
            prompt_tokens=self.tokens,
            exact=self.exact,
            predicted_cached_tokens=self.predicted_tokens,
            reported_cached_tokens=self.reported_tokens,
            estimated_ttft_s=round(decision.ttft_s, 6),
            ttft_s=round(first_s - arrived_s, 6) if first_s else None,
            duration_s=round(ended_s - arrived_s, 6),
            waited_s=round(waited_s, 6),
            retries=self.retries,
            resumes=self.resumes,
            status=self.status,
            why=self.why or None,
            candidates=[
                Considered(one.name, int(matched.get(one.slot, 0)), None if cost == INFINITE else round(cost, 6))
                for one, cost in zip(decision.candidates, decision.costs, strict=True)
            ],
        )
