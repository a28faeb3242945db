"""A measured rate is that of most samples, however wrong a few of them are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.measured_rate import ENOUGH, KEPT, OUTLIER, MeasuredRate


def measured(*samples: tuple[int, float]) -> float:
    rate = MeasuredRate()
    for amount, seconds in samples:
        rate.add(amount, seconds)
    return rate.per_s


def test_it_is_unknown_until_there_are_enough_samples() -> None:
    assert measured(*[(100, 0.5)] * (ENOUGH - 1)) == 0
    assert measured(*[(100, 0.5)] * ENOUGH) == pytest.approx(200)


def test_large_samples_weigh_more_than_small_ones() -> None:
    assert measured((1000, 1.0), (1000, 2.0), (10, 0.025)) == pytest.approx(2010 / 3.025)


def test_the_first_sample_of_a_cold_engine_does_not_stand_for_all() -> None:
    assert measured((2000, 30.0), (2000, 0.2), (2000, 0.2)) == pytest.approx(10_000 * 3 / (2 + OUTLIER))
    assert measured((2000, 30.0), *[(2000, 0.2)] * 9) > 0.8 * 10_000


@pytest.mark.parametrize("seconds", [60.0, 1e-6])
def test_an_interruption_among_many_moves_it_little(seconds: float) -> None:
    assert measured(*[(300, 0.015)] * 20, (300, seconds), *[(300, 0.015)] * 5) == pytest.approx(20_000, rel=0.1)


def test_a_change_is_believed_once_most_samples_show_it() -> None:
    assert measured(*[(300, 0.015)] * KEPT, *[(300, 0.15)] * KEPT) == pytest.approx(2000)


def test_samples_that_took_no_time_divide_nothing_by_zero() -> None:
    assert measured(*[(300, 0.0)] * 5) == 0
    assert measured(*[(300, 0.0)] * 2, *[(300, 0.015)] * 3) > 20_000


SAMPLES = st.tuples(st.integers(1, 100_000), st.floats(0, 100))


@given(st.lists(SAMPLES, min_size=ENOUGH, max_size=2 * KEPT))
def test_it_is_one_that_some_samples_have_within_the_factor(samples: list[tuple[int, float]]) -> None:
    rate = measured(*samples)
    kept = samples[-KEPT:]
    assert rate >= 0
    if rate:
        each = [seconds / amount for amount, seconds in kept]
        assert min(each) / OUTLIER * 0.999 <= 1 / rate <= max(each) * OUTLIER * 1.001


@given(st.lists(SAMPLES, min_size=ENOUGH, max_size=KEPT))
def test_the_order_of_the_samples_does_not_matter(samples: list[tuple[int, float]]) -> None:
    assert measured(*samples) == pytest.approx(measured(*sorted(samples)))
