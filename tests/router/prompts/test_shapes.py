from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.prompts import shapes
from router.prompts.shapes import DIFFERS, NOT_YET, PLAIN, Difference, Oddities, Shapes, difference

FOUND = Difference("r0", 3, "a", "b")
NAMES = st.sampled_from(["chat", "tools", "parts"])
PROCESSES = st.sampled_from(["r0 #1", "r1 #2", "r0 #3"])
ODDITIES = st.frozensets(st.sampled_from(["empty texts", "escapes"]))
STEPS = st.lists(
    st.tuples(st.sampled_from(["verified", "differed", "forget", "ask"]), NAMES, PROCESSES, ODDITIES), max_size=40
)


def plain() -> Oddities:
    return PLAIN


@given(steps=STEPS)
def test_a_shape_is_exact_where_it_is_verified_and_nothing_as_odd_differs(
    steps: list[tuple[str, str, str, Oddities]],
) -> None:
    known, now_s = Shapes(), 0.0
    verified: set[tuple[str, str]] = set()
    differing: set[tuple[str, str, Oddities]] = set()
    for step, name, process, odd in steps:
        if step == "verified":
            known.verified(name, process, lambda odd=odd: odd)  # type: ignore[misc]
            differing.discard((name, process, odd))
            if (name, process, PLAIN) not in differing:
                verified.add((name, process))
        elif step == "differed":
            known.differed(name, process, lambda odd=odd: odd, FOUND, now_s)  # type: ignore[misc]
            differing.add((name, process, odd))
            if odd == PLAIN:
                verified.discard((name, process))
        elif step == "forget":
            known.forget(process)
            verified = {one for one in verified if one[1] != process}
            differing = {one for one in differing if one[1] != process}
        for each in ("chat", "tools", "parts"):
            differs = any(one[0] == each and one[2] <= odd for one in differing)
            exact = any(one[0] == each for one in verified) and not differs
            why_not = known.why_not(each, lambda odd=odd: odd)  # type: ignore[misc]
            assert why_not == (None if exact else DIFFERS if differs else NOT_YET)
            assert known.is_exact(each) == (known.why_not(each, plain) is None)
        assert known.is_verified_at(name, process) == ((name, process) in verified)
        asked = (name, process) in verified or {(name, process, PLAIN), (name, process, odd)} & differing
        assert known.may_ask(name, process, lambda odd=odd: odd, now_s) == (not asked)  # type: ignore[misc]
    assert len(list(known.differences())) == len(differing)


def test_what_is_odd_is_only_looked_for_where_something_differed() -> None:
    def never() -> Oddities:
        raise AssertionError("looked for")

    known = Shapes()
    known.verified("chat", "p", never)
    assert known.why_not("chat", never) is None and not known.may_ask("chat", "p", never, 0.0)


def test_a_replica_that_differed_is_asked_again_ever_later() -> None:
    known = Shapes()
    for times in range(10):
        known.differed("chat", "p", plain, FOUND, 0.0)
        wait_s = min(shapes.MAX_RETRY_S, shapes.RETRY_S * 2**times)
        assert not known.may_ask("chat", "p", plain, wait_s - 1) and known.may_ask("chat", "p", plain, wait_s)


def test_differences_of_a_shape_are_few_and_those_of_plain_requests_stay() -> None:
    known = Shapes()
    known.differed("chat", "p", plain, FOUND, 0.0)
    for number in range(1000):
        known.differed("chat", "p", lambda number=number: frozenset([str(number)]), FOUND, 0.0)  # type: ignore[misc]
    assert len(list(known.differences())) == shapes.MAX_DIFFERENCES and known.why_not("chat", plain) == DIFFERS


def test_an_engine_that_says_nothing_is_asked_now_and_then() -> None:
    known = Shapes()
    known.unanswered("it answers 404", 0.0)
    assert known.silent == "it answers 404"
    assert not known.may_ask("chat", "p", plain, shapes.RETRY_S - 1)
    assert known.may_ask("chat", "p", plain, shapes.RETRY_S)
    known.verified("chat", "p", plain)
    assert known.silent is None


def test_shapes_that_nobody_uses_make_room(monkeypatch: Any) -> None:
    monkeypatch.setattr(shapes, "MAX_SHAPES", 8)
    known = Shapes()
    known.verified("usual", "p", plain)
    for number in range(100):
        assert known.why_not("usual", plain) is None
        known.verified(f"odd {number}", "p", plain)
        assert len(known.known) <= 8
    assert known.why_not("usual", plain) is None and known.why_not("odd 3", plain) == NOT_YET


def test_looking_a_shape_up_remembers_nothing() -> None:
    known = Shapes()
    for number in range(100):
        assert known.why_not(f"odd {number}", plain) == NOT_YET
    assert known.known == {}


def test_the_first_difference_is_shown_with_its_surroundings() -> None:
    ours, theirs = list(range(100)), [*range(60), 7, *range(61, 100)]
    found = difference("r0", ours, theirs, str)
    assert found is not None and (found.replica, found.position) == ("r0", 60)
    assert "59, 60, 61" in found.ours and "59, 7, 61" in found.theirs
    longer = difference("r0", [1, 2], [1, 2, 3], str)
    assert longer is not None and (longer.position, longer.ours, longer.theirs) == (2, "[1, 2]", "[1, 2, 3]")
    assert difference("r0", [1, 2], [1, 2], str) is None
