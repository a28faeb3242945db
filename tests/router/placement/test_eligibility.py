"""Eligibility of replicas for a request, and the one place that decides it."""

import re
from pathlib import Path

import pytest

from router.placement.cost import Candidate, Obstacle, can_take, in_words, obstacles

ROOT = Path(__file__).resolve().parents[3]


def one(**fields: object) -> Candidate:
    candidate = Candidate("r0", 0)
    for name, value in fields.items():
        setattr(candidate, name, value)
    return candidate


@pytest.mark.parametrize(
    ("fields", "obstacle", "words"),
    [
        ({}, None, None),
        ({"limit": 2, "all_in_flight": 1}, None, None),
        ({"limit": 2, "all_in_flight": 2}, "full", "full: 2 requests in flight, its limit is 2"),
        ({"unavailable": "draining"}, "unavailable", "draining"),
        ({"max_model_len": 999}, "too_long", "too long: 1,000 tokens, its max_model_len is 999"),
        ({"name": "failed"}, "tried", "has failed this request before"),
        # What lasts longest is said first.
        ({"name": "failed", "limit": 1, "all_in_flight": 1}, "tried", "has failed this request before"),
        ({"name": "failed", "unavailable": "draining"}, "unavailable", "draining"),
        ({"unavailable": "draining", "max_model_len": 9}, "too_long", "too long: 1,000 tokens, its max_model_len is 9"),
    ],
)
def test_each_obstacle_is_found_and_said(fields: dict[str, object], obstacle: Obstacle | None, words: str) -> None:
    candidate = one(**fields)
    assert obstacles([candidate], 1000, frozenset({"failed"})) == [obstacle]
    assert can_take(candidate, 1000, frozenset({"failed"})) == (obstacle is None)
    assert in_words(obstacle, candidate, 1000) == words


@pytest.mark.parametrize(
    ("limit", "in_flight", "is_full"), [(0, 99, False), (1, 0, False), (8, 3, False), (8, 4, True)]
)
def test_who_stands_back_leaves_half_of_the_room(limit: int, in_flight: int, is_full: bool) -> None:
    candidate = one(limit=limit, all_in_flight=in_flight)
    assert obstacles([candidate], stands_back=True) == ["full" if is_full else None]
    assert obstacles([candidate]) == [None]


def test_a_suspected_replica_is_tried_if_it_is_the_only_one() -> None:
    believed, known = one(unavailable="faults", may_try_anyway=True), one(unavailable="draining")
    assert obstacles([believed, known]) == ["unavailable", "unavailable"]
    assert obstacles([believed, known], anyway=True) == [None, "unavailable"]


def test_eligibility_is_decided_in_one_place() -> None:
    """Limits are compared, and `may_try_anyway` is asked, in this module alone."""
    decides = re.compile(
        r"limit\b\s*<=.*all_in_flight|all_in_flight\s*>=.*limit|if .*\bmay_try_anyway|and .*\bmay_try_anyway"
    )
    found = {
        str(path.relative_to(ROOT))
        for package in ("router", "lab", "fleet")
        for path in (ROOT / package).rglob("*.py")
        if decides.search(path.read_text())
    }
    assert found == {"router/placement/cost.py"}
