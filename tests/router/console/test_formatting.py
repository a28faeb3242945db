"""Figures in few letters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from router.console.formatting import ago, count, cut, duration, padded, percent, rate, short


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0, "0"),
        (999, "999"),
        (1234, "1.2k"),
        (31_400, "31k"),
        (4_700_000, "4.7M"),
        (2e9, "2.0G"),
    ],
)
def test_numbers_are_short(number: float | None, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(("per_s", "text"), [(None, "-"), (0, "0"), (0.25, "0.2"), (9.94, "9.9"), (12.3, "12")])
def test_rates_are_short(per_s: float | None, text: str) -> None:
    assert rate(per_s) == text


@pytest.mark.parametrize(
    ("age_s", "text"), [(None, "-"), (0.21, "0.2s"), (45.2, "45s"), (720, "12m"), (7200, "2h"), (9 * 86400, "9d")]
)
def test_ages_are_short(age_s: float | None, text: str) -> None:
    assert ago(age_s) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.0841, "84 ms"), (0.9999, "1.0 s"), (12.34, "12.3 s")])
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_parts_and_counts() -> None:
    assert (percent(None), percent(0.934)) == ("-", "93%")
    assert (count(1, "token"), count(1200, "token")) == ("1 token", "1,200 tokens")


def test_names_are_cut_in_their_middle() -> None:
    assert cut("replica-2.some-namespace:8000", 12, middle=True) == "repli…e:8000"
    assert cut("what it begins with", 8) == "what it…"


@given(st.text(max_size=30), st.integers(0, 20), st.booleans(), st.booleans())
def test_a_cell_has_its_width_whatever_letters_are_in_it(text: str, width: int, middle: bool, right: bool) -> None:
    assert cell_len(padded(cut(text, width, middle=middle), width, right=right)) == width
