"""A ring of points, beside a list."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dashboard.sampling import Series

NAMES = ("one", "other")
VALUE = st.one_of(st.none(), st.integers(-1000, 1000).map(float))
POINTS = st.lists(st.tuples(VALUE, VALUE), max_size=40)


@given(st.integers(1, 12), POINTS)
def test_it_holds_the_newest_points_oldest_first(most: int, points: list[tuple[float | None, float | None]]) -> None:
    series = Series(NAMES, most)
    for number, point in enumerate(points):
        series.add(float(number), point)
        kept = list(enumerate(points[: number + 1]))[-most:]
        assert series.columns() == {
            "at": [float(at) for at, _ in kept],
            "one": [one for _, (one, _) in kept],
            "other": [other for _, (_, other) in kept],
        }


@pytest.mark.parametrize(("value", "shown"), [(0.1, 0.1), (0.001234, 0.001234), (math.nan, None), (math.inf, None)])
def test_numbers_are_shown_as_they_were_given(value: float, shown: float | None) -> None:
    series = Series(("one",), 1)
    series.add(0.0, [value])
    assert series.columns()["one"] == [shown]
