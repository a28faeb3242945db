from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.parsing.stops import StopStrings

AB = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def by_the_book(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the text to show in the end, and the stop string that ended it."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(text=AB, stops=STOPS, include=st.booleans(), cuts=st.sets(st.integers(1, 29)))
@example(text="ab", stops=["b", "abc"], include=False, cuts=set())
@example(text="aab", stops=["ab", "aab"], include=False, cuts={1, 2})
def test_the_text_ends_at_the_first_complete_stop_string(
    text: str, stops: list[str], include: bool, cuts: set[int]
) -> None:
    strings = StopStrings(stops, include)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    shown = "".join(strings.feed(text[start:end]) for start, end in pairwise(bounds))
    assert (shown + strings.finish(), strings.stopped) == by_the_book(text, stops, include)


@given(text=AB, stops=STOPS, cut=st.integers(0, 30))
def test_what_is_shown_depends_on_the_text_and_not_on_the_cuts(text: str, stops: list[str], cut: int) -> None:
    at_once, in_two, one_by_one = StopStrings(stops), StopStrings(stops), StopStrings(stops)
    expected = at_once.feed(text)
    assert in_two.feed(text[:cut]) + in_two.feed(text[cut:]) == expected
    assert "".join(map(one_by_one.feed, text)) == expected
    assert at_once.stopped == in_two.stopped == one_by_one.stopped
    assert at_once.finish() == in_two.finish() == one_by_one.finish()


@given(text=AB, stops=STOPS)
def test_nothing_is_held_that_cannot_become_a_stop_string(text: str, stops: list[str]) -> None:
    strings = StopStrings(stops)
    shown = strings.feed(text)
    if strings.stopped is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty; leave it out"):
        StopStrings(["a", ""])


def test_a_hostile_stop_string_costs_little() -> None:
    strings = StopStrings(["a" * 511 + "b" + "a" * 512] * 16)
    for _ in range(200):
        strings.feed("a" * 100)
    assert strings.stopped is None
