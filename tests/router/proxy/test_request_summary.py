"""Summaries of finished requests."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.members.feed import Moment
from router.placement.decision import Prediction
from router.proxy.predicted_hit import PredictedHit
from router.proxy.request_summary import RequestSummary, compare, past_decision
from tests.router.placement.test_placement import Prompt, Scene

ROUTER = Path(__file__).resolve().parents[3] / "router"


def crowded() -> Any:
    scene = Scene(replicas=1)
    for number in range(3):
        scene.place(Prompt(first=1000 * number), 1.0)
    question, _ = scene.it.question(Prompt(first=9000), scene.slots, 2.0)
    return scene.it.decide(question, [load.candidate for load in scene.loads])


def test_what_is_kept_of_a_decision_leaves_the_decision_itself_as_it_was() -> None:
    decision = crowded()
    assert decision.effects is not None
    some: Any = SimpleNamespace
    generation = PredictedHit(
        some(all_tokens=160, exact=True, doubt=None, why_not=None, choices=1, peek=some(model="m")), decision
    )
    summary = RequestSummary(
        exchange=some(status=200), admitted=some(request_id="r"), arrived_s=1.0, ended_s=3.0, first_byte_s=1.5
    )
    past = past_decision(summary, generation)
    assert past.decision.effects is None and decision.effects is not None
    assert (past.outcome.ttft_s, past.outcome.duration_s) == (0.5, 2.0)
    [told] = past.record().candidates
    assert told.cost_s == pytest.approx(decision.costs[0], abs=1e-6)
    assert told.parts is not None and told.parts.harm_s == pytest.approx(
        decision.effects.delayed[0] / decision.rates[0]
    )


def test_a_request_alone_writes_its_fields() -> None:
    """Elsewhere nothing is assigned to a field of something called a generation, an owner or a decision."""
    written = {
        f"{path.relative_to(ROUTER)}: {ast.unparse(target)}"
        for path in ROUTER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in ast.walk(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if isinstance(target, ast.Attribute)
        if isinstance(target.value, ast.Name) and target.value.id in ("generation", "routing", "decision", "owner")
    }
    chosen = ("chosen", "effects", "later_s", "portions", "rejection", "ttft_s", "uncached_tokens")
    of_choice = {f"placement/policy.py: decision.{field}" for field in chosen}
    of_sessions = {
        f"placement/placement.py: decision.{field}" for field in ("chosen", "rejection")
    }  # a session is held
    assert written == {"placement/placement.py: decision.tie_break", *of_choice, *of_sessions}


# ---- what is exact


KNOWN: Any = SimpleNamespace(doubt=None, exact=True, why_not=None, choices=1)
TWICE: Any = SimpleNamespace(doubt=None, exact=True, why_not=None, choices=2)
UNVERIFIED: Any = SimpleNamespace(doubt="not verified", exact=True, why_not=None, choices=1)
GUESSED: Any = SimpleNamespace(doubt=None, exact=False, why_not="no tokenizer", choices=1)
SURE = Prediction(16, 2, 2, True)


@pytest.mark.parametrize(
    ("prompt", "prediction", "doubt", "claims", "why"),
    [
        (KNOWN, SURE, None, (True, True, True), None),
        (KNOWN, Prediction(16, 2, 1, False), None, (True, True, False), "no event has confirmed"),
        (KNOWN, Prediction(16, 2, 2, False), None, (True, True, False), "lower media"),
        (KNOWN, Prediction(16, 2, 2, False, pulls=True), None, (True, True, False), "from a neighbour"),
        (KNOWN, SURE, "not connected", (True, False, False), "not connected"),
        (KNOWN, None, "no events", (True, False, False), "no events"),
        (KNOWN, None, None, (True, True, False), "to score it"),
        (TWICE, Prediction(16, 0, 0, True), None, (True, True, False), "several choices"),
        (UNVERIFIED, SURE, None, (False, True, False), "not verified"),
        (GUESSED, None, None, (False, True, False), "no tokenizer"),
        (GUESSED, None, "no events", (False, False, False), "no tokenizer"),
    ],
)
def test_tokens_index_and_prediction_are_claimed_apart(
    prompt: Any, prediction: Prediction | None, doubt: str | None, claims: tuple[bool, bool, bool], why: str | None
) -> None:
    found = PredictedHit(prompt, prediction=prediction, index_doubt=doubt).exactness
    assert (found.tokens, found.index, found.prediction) == claims
    assert found.why_not is None if why is None else why in (found.why_not or "")


# ---- what is compared


@pytest.mark.parametrize(
    ("choices", "resumes", "reported", "at", "compared"),
    [
        (1, 0, 64, Moment(0, 0, True), True),
        (2, 0, 64, Moment(0, 0, True), False),  # the report is of one of them, or of all
        (1, 1, 64, Moment(0, 0, True), False),
        (1, 0, None, Moment(0, 0, True), False),
        (1, 0, 64, None, False),
    ],
)
def test_a_report_is_compared_if_it_is_about_the_prompt_of_the_prediction(
    choices: int, resumes: int, reported: int | None, at: Moment | None, compared: bool
) -> None:
    some: Any = SimpleNamespace
    books: Any = some(calls=[])
    books.compare = lambda *arguments, sure: books.calls.append((*arguments, sure))
    predicted = Prediction(16, 3, 3, sure=True)
    member, prompt = some(name="r", accuracy=None, feed=None), some(tokens=160, exact=True, doubt=None, choices=choices)
    generation = PredictedHit(prompt, some(), member, predicted, at, reported_tokens=reported)
    summary = RequestSummary(exchange=some(), admitted=some(), arrived_s=1.0, ended_s=3.0, resumes=resumes)
    compare(books, summary, generation, [7, 8, 9])
    assert books.calls == ([("r", None, None, predicted, at, 4, [7, 8, 9], 3.0, True)] if compared else [])
