from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.prompts import shapes
from router.prompts.shapes import DIFFERS, NOT_YET, Difference, Shapes, difference

FOUND = Difference("r0", 3, "a", "b")
NAMES = st.sampled_from(["chat", "tools", "parts"])
PROCESSES = st.sampled_from(["r0 #1", "r1 #2", "r0 #3"])
STEPS = st.lists(st.tuples(st.sampled_from(["verified", "differed", "forget", "ask"]), NAMES, PROCESSES), max_size=40)


@given(steps=STEPS)
def test_a_shape_is_exact_where_it_is_verified_and_nowhere_differs(steps: list[tuple[str, str, str]]) -> None:
    known, now_s = Shapes(), 0.0
    verified: set[tuple[str, str]] = set()
    differing: set[tuple[str, str]] = set()
    for step, name, process in steps:
        if step == "verified":
            known.verified(name, process)
            verified.add((name, process))
            differing.discard((name, process))
        elif step == "differed":
            known.differed(name, process, FOUND, now_s)
            differing.add((name, process))
            verified.discard((name, process))
        elif step == "forget":
            known.forget(process)
            verified = {one for one in verified if one[1] != process}
            differing = {one for one in differing if one[1] != process}
        for each in ("chat", "tools", "parts"):
            differs = any(one[0] == each for one in differing)
            exact = any(one[0] == each for one in verified) and not differs
            assert known.why_not(each) == (None if exact else DIFFERS if differs else NOT_YET)
            assert known.is_exact(each) == exact
        assert known.is_verified_at(name, process) == ((name, process) in verified)
        assert known.may_ask(name, process, now_s) == ((name, process) not in verified | differing)
    assert {name for name, _ in known.differences()} == {name for name, _ in differing}


def test_a_replica_that_differed_is_asked_again_ever_later() -> None:
    known = Shapes()
    for times in range(10):
        known.differed("chat", "p", FOUND, 0.0)
        wait_s = min(shapes.MOST_RETRY_S, shapes.RETRY_S * 2**times)
        assert not known.may_ask("chat", "p", wait_s - 1) and known.may_ask("chat", "p", wait_s)


def test_an_engine_that_says_nothing_is_asked_now_and_then() -> None:
    known = Shapes()
    known.unanswered("it answers 404", 0.0)
    assert known.silent == "it answers 404"
    assert not known.may_ask("chat", "p", shapes.RETRY_S - 1) and known.may_ask("chat", "p", shapes.RETRY_S)
    known.verified("chat", "p")
    assert known.silent is None


def test_shapes_that_nobody_uses_make_room(monkeypatch: Any) -> None:
    monkeypatch.setattr(shapes, "MOST_SHAPES", 8)
    known = Shapes()
    known.verified("usual", "p")
    for number in range(100):
        assert known.why_not("usual") is None
        known.verified(f"odd {number}", "p")
        assert len(known.known) <= 8
    assert known.why_not("usual") is None and known.why_not("odd 3") == NOT_YET


def test_looking_a_shape_up_remembers_nothing() -> None:
    known = Shapes()
    for number in range(100):
        assert known.why_not(f"odd {number}") == NOT_YET
    assert known.known == {}


def test_the_first_difference_is_shown_with_its_surroundings() -> None:
    ours, theirs = list(range(100)), [*range(60), 7, *range(61, 100)]
    found = difference("r0", ours, theirs, str)
    assert found is not None and (found.replica, found.position) == ("r0", 60)
    assert "59, 60, 61" in found.ours and "59, 7, 61" in found.theirs
    longer = difference("r0", [1, 2], [1, 2, 3], str)
    assert longer is not None and (longer.position, longer.ours, longer.theirs) == (2, "[1, 2]", "[1, 2, 3]")
    assert difference("r0", [1, 2], [1, 2], str) is None
