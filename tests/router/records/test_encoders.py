"""The texts that leave the process, to the byte: a decision in /decisions and in /explain."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from router.placement.decision import Prediction
from router.placement.elsewhere import Split
from router.proxy.predicted_hit import PredictedHit, PrefillHalf
from router.proxy.request_summary import RequestSummary, past_decision
from tests.router.placement.test_placement import Prompt, Scene

ENCODED = Path(__file__).with_name("encoded.jsonl")
some: Any = SimpleNamespace


def over(*, is_split: bool = False) -> tuple[Any, Any]:
    """A decision between two replicas of which one is busy, and what is remembered of it."""
    scene = Scene(replicas=2)
    for number in range(3):
        scene.place(Prompt(first=1000 * number), 1.0)
    question, _ = scene.it.question(Prompt(first=1), scene.slots, 2.0, session="me")
    decision = scene.it.decide(question, [load.candidate for load in scene.loads])
    prompt = some(all_tokens=160, exact=True, doubt=None, peek=some(model="m"))
    member = some(name="r0", slot=0)
    prediction = Prediction(16, 3, 2, False)
    hit = PredictedHit(prompt, decision, member, prediction, index_doubt="2 batches are lost", reported_tokens=32)
    there = Split(True, "sooner there", decision, 0.5, 0.1, 0.2, 0.0, 0.05)
    prefill = PrefillHalf(there, "handed", 0.25, hit)
    summary = RequestSummary(
        exchange=some(status=200),
        admitted=some(request_id="req-1"),
        arrived_s=1.0,
        ended_s=3.5,
        first_byte_s=1.25,
        waited_s=0.125,
        retries=1,
        resumes=2,
        prefill=prefill if is_split else None,
    )
    return decision, past_decision(summary, hit)


def without_time(encoded: bytes, name: str) -> str:
    told = msgspec.json.decode(encoded)
    assert isinstance(told.pop(name), float)
    return msgspec.json.encode(told).decode()


def test_what_is_said_of_a_decision_is_the_same_to_the_byte() -> None:
    """`encoded.jsonl` was written before there was one record: of a request, of one in two halves, and two verdicts."""
    said: list[str] = []
    for is_split in (False, True):
        decision, past = over(is_split=is_split)
        said.append(without_time(msgspec.json.encode(past.record()), "ts"))
    for verdict in decision.verdicts():
        verdict.sure_tokens = 16
        said.append(msgspec.json.encode(verdict).decode())
    assert said == ENCODED.read_text().splitlines()
