"""Histograms as Prometheus wants them."""

from hypothesis import given
from hypothesis import strategies as st

from router.tally import DECISION_S, FIRST_TOKEN_S, REQUEST_S, Histogram, Tally

SECONDS = st.lists(st.floats(0, 1e5, allow_nan=False))


def test_the_bounds_grow() -> None:
    for bounds in (FIRST_TOKEN_S, REQUEST_S, DECISION_S):
        assert list(bounds) == sorted(set(bounds))


def test_a_value_counts_in_the_bucket_whose_bound_it_is() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.1, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]


@given(SECONDS)
def test_buckets_are_cumulative_and_complete(values: list[float]) -> None:
    histogram = Histogram(FIRST_TOKEN_S)
    for value in values:
        histogram.observe(value)
    for name, count in histogram.buckets():
        assert count == sum(value <= float(name.replace("+Inf", "inf")) for value in values)
    assert histogram.total == sum(values)


def test_two_tallies_share_nothing() -> None:
    one, other = Tally(), Tally()
    one.statuses[200] = 1
    one.request_s.observe(1.0)
    assert not other.statuses and other.request_s.total == 0
