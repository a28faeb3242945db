"""Decisions explained without being carried out, in large fleets and while members change."""

import random
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from router.http.explaining import runs_of
from router.placement.cost import Candidate, Question
from router.placement.policy import choose


@given(st.lists(st.integers(0, 15), max_size=30))
def test_runs_are_those_that_each_slot_has_one_by_one(holders: list[int]) -> None:
    expected: dict[int, list[tuple[int, int]]] = {}
    for slot in range(4):
        held = [block for block, mask in enumerate(holders) if mask >> slot & 1]
        for _, run in groupby(enumerate(held), lambda place: place[1] - place[0]):
            blocks = [block for _, block in run]
            expected.setdefault(slot, []).append((blocks[0], blocks[-1]))
    assert runs_of(holders) == expected


def test_a_decision_at_rest_is_explained_as_it_was_made() -> None:
    candidates = [Candidate(f"r{slot}", slot, queued_tokens=100.0 * slot) for slot in range(3)]
    decision = choose("cost", Question(tokens=1000, matched={}), candidates, random.Random(0))
    explained, at_rest = list(decision.verdicts()), decision.at_rest()
    for one in candidates:
        one.queued_tokens, one.in_flight, one.unavailable = 9e6, 7, "draining"
    assert list(at_rest.verdicts()) == explained
    assert list(decision.verdicts()) != explained
    assert at_rest.chosen is not None and at_rest.chosen.name == "r0"
