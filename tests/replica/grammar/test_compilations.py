"""Constraints on their way to the engine: in order, without the cancelled ones, and never more than may wait."""

from collections.abc import Iterator

import pytest

from api.native import pack_ids
from api.openai.constraints import Constraint
from replica.grammar.compilations import Compilations, Compiled
from replica.messages import Refused, Sampling, Submit
from tests.events.processes import wait_until
from tests.replica.grammar.constraints import KINDS, allowed, packed


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    own = Compilations(most_waiting=3)
    yield own
    own.close()


def submits(*ids: int, constraint: Constraint = KINDS["regex"], output: bytes = b"") -> list[Submit]:
    return [Submit(id, b"\0\0\0\0", Sampling(9, constraint=constraint), output=output) for id in ids]


def taken(compilations: Compilations) -> list[Compiled | Refused]:
    found: list[Compiled | Refused] = []

    def all_are_taken() -> bool:
        found.extend(compilations.take())
        return not compilations

    wait_until(all_are_taken, "all are compiled")
    return found


def test_each_choice_has_a_matcher_of_its_own_and_requests_keep_their_order(compilations: Compilations) -> None:
    compilations.learn(packed())
    for ids in ((1, 2), (3,)):
        assert compilations.add(submits(*ids)) is None
    first, second = taken(compilations)
    assert isinstance(first, Compiled) and isinstance(second, Compiled)
    assert [submit.id for submit in (*first.submits, *second.submits)] == [1, 2, 3]
    assert first.matchers[0].follow(list(b"AB"))
    assert allowed(first.matchers[0]) != allowed(first.matchers[1]) == allowed(second.matchers[0])


def test_the_vocabulary_comes_first(compilations: Compilations) -> None:
    refused = compilations.add(submits(1))
    assert refused is not None and refused.reason == "invalid"
    assert not compilations


def test_what_was_cancelled_meanwhile_is_left_out(compilations: Compilations) -> None:
    compilations.learn(packed())
    for ids in ((1, 2), (3,)):
        compilations.add(submits(*ids))
    for id in (1, 3, 99):
        compilations.cancel(id)
    [left] = taken(compilations)
    assert isinstance(left, Compiled) and [submit.id for submit in left.submits] == [2]
    assert len(left.matchers) == 1


def test_only_so_many_wait(compilations: Compilations) -> None:
    compilations.learn(packed())
    refused = [compilations.add(submits(id)) for id in range(5)]
    assert [one and one.reason for one in refused] == [None, None, None, "full", "full"]
    assert len(taken(compilations)) == 3
    assert compilations.add(submits(9)) is None


def test_a_resumed_answer_is_followed_and_checked(compilations: Compilations) -> None:
    compilations.learn(packed())
    compilations.add(submits(1, output=pack_ids(list(b"AB-"))))
    compilations.add(submits(2, output=pack_ids(list(b"xy"))))
    compilations.add(submits(3, constraint=Constraint("regex", "(a")))
    went_on, broken, wrong = taken(compilations)
    assert isinstance(went_on, Compiled)
    assert set(allowed(went_on.matchers[0])) >= set(b"0123456789") and ord("A") not in allowed(went_on.matchers[0])
    assert isinstance(broken, Refused) and (broken.id, broken.reason) == (2, "invalid")
    assert "does not allow" in broken.message
    assert isinstance(wrong, Refused) and "unclosed group" in wrong.message
