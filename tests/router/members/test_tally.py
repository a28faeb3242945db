"""Histograms in Prometheus' format."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.prometheus import FIRST_TOKEN_S, Histogram
from router.members.tally import SEEN_NUMBERS, Seen, Tally

SECONDS = st.lists(st.floats(0, 1e5, allow_nan=False))


@given(SECONDS)
def test_buckets_are_cumulative_and_complete(values: list[float]) -> None:
    histogram = Histogram(FIRST_TOKEN_S)
    for value in values:
        histogram.observe(value)
    for name, count in histogram.buckets():
        assert count == sum(value <= float(name.replace("+Inf", "inf")) for value in values)
    assert histogram.total == pytest.approx(sum(values))  # which is more exact since Python 3.12


# ---- what comes again


def test_a_replicas_models_share_one_table_and_count_each_for_itself() -> None:
    """Tables are what a tally is large by, and adapters are many."""
    seen = Seen()
    tallies = [Tally(seen) for _ in range(100)]
    tracemalloc.start()
    try:
        for number, tally in enumerate(tallies):
            for _ in range(2):
                tally.sent((f"model-{number}", "salt"))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 4 * 8 * SEEN_NUMBERS
    assert {(tally.salted, tally.new_salts) for tally in tallies} == {(2, 1)}


def test_a_salt_is_new_once() -> None:
    tally = Tally(Seen())
    for salt in ("a", "b", "a", "b", "c"):
        tally.sent(salt)
    assert (tally.salted, tally.new_salts) == (5, 3)


def test_what_is_remembered_does_not_grow() -> None:
    seen = Seen()
    for number in range(3 * SEEN_NUMBERS):
        seen.add(number)
    assert seen.add(3 * SEEN_NUMBERS - 1)
    assert not seen.add(0)
