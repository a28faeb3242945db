"""Summaries of finished requests."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from router.members.feed import Moment
from router.members.tally import Seen, Tally
from router.placement.cost import INFINITE
from router.placement.decision import Prediction
from router.placement.holders import Gone
from router.proxy.facts import prompt_use
from router.proxy.predicted_hit import PredictedHit
from router.proxy.request_summary import RequestSummary, compare, count_prefill, past_decision
from router.responses import CAUSES
from tests.router.placement.test_placement import Prompt, Scene

ROUTER = Path(__file__).resolve().parents[3] / "router"
some: Any = SimpleNamespace


def crowded() -> Any:
    scene = Scene(replicas=1)
    for number in range(3):
        scene.place(Prompt(first=1000 * number), 1.0)
    question, _ = scene.it.question(Prompt(first=9000), scene.slots, 2.0)
    return scene.it.decide(question, [load.candidate for load in scene.loads])


def test_what_is_kept_of_a_decision_leaves_the_decision_itself_as_it_was() -> None:
    decision = crowded()
    assert decision.effects is not None
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
    assert written == {*of_choice, *of_sessions}


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
    books: Any = some(calls=[])
    books.compare = lambda *arguments, sure: books.calls.append((*arguments, sure))
    predicted = Prediction(16, 3, 3, sure=True)
    member, prompt = some(name="r", accuracy=None, feed=None), some(tokens=160, exact=True, doubt=None, choices=choices)
    generation = PredictedHit(prompt, some(), member, predicted, at, reported_tokens=reported)
    summary = RequestSummary(exchange=some(), admitted=some(), arrived_s=1.0, ended_s=3.0, resumes=resumes)
    compare(books, summary, generation, [7, 8, 9])
    assert books.calls == ([("r", None, None, predicted, at, 4, [7, 8, 9], 3.0, True)] if compared else [])


# ---- why it was computed


CHAIN = [xxh3_64_intdigest(b"%d" % number) for number in range(20)]
BLOCKS, REPORTS = st.integers(0, 20), st.sampled_from([None, 10**9]) | st.integers(0, 320)


@example(tokens=100, cached=5, held=[0] * 4, claimed=0, lost=0)
@given(st.integers(1, 320), REPORTS, st.lists(BLOCKS, min_size=4, max_size=4), BLOCKS, BLOCKS)
def test_whatever_an_engine_tells_the_causes_of_what_it_computed_add_up(
    tokens: int, cached: int | None, held: list[int], claimed: int, lost: int
) -> None:
    question = some(matched={slot: 16.0 * blocks for slot, blocks in enumerate(held)}, below={})
    decision = some(question=question, candidates=[some(slot=0), some(slot=1)], costs=[1.0, INFINITE])
    prediction = Prediction(16, min(claimed, (tokens - 1) // 16), claimed, True)
    hit = PredictedHit(some(tokens=tokens, choices=1), decision, prediction=prediction, reported_tokens=cached)
    hit.member = some(slot=0, feed=None, load=some(total_blocks=1000))
    tally, gone, used = Tally(Seen()), Gone(), prompt_use(tokens, cached or 0)
    gone.add(CHAIN[:lost])
    count_prefill(tally, some(used=used, resumes=0), hit, CHAIN, gone)
    unknown, elsewhere, evicted, new = (getattr(tally, cause) for cause in CAUSES)
    assert unknown + elsewhere + evicted + new == used.computed == max(0, tokens - (cached or 0))
    assert min(unknown, elsewhere, new) >= 0 and 0 <= tally.kept_tokens <= evicted
    assert cached is not None or unknown == tokens
    if cached is not None and lost == 20 and not claimed + sum(held):
        assert evicted == max(0, (tokens - 1) // 16 * 16 - cached)
