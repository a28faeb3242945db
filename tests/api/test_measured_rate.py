"""A measured rate is that of most samples, however wrong or large a few of them are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.measured_rate import ENOUGH, KEPT, OUTLIER, MeasuredRate

LARGE = 100_000


def measured(*samples: tuple[int, float]) -> float:
    rate = MeasuredRate()
    for amount, seconds in samples:
        rate.add(amount, seconds)
    return rate.per_s


def test_it_is_unknown_until_there_are_enough_samples() -> None:
    assert measured(*[(100, 0.5)] * (ENOUGH - 1)) == 0
    assert measured(*[(100, 0.5)] * ENOUGH) == pytest.approx(200)


@pytest.mark.parametrize("amount", [1, 2000, LARGE])
@pytest.mark.parametrize("times", [0.01, 100.0])
@pytest.mark.parametrize("others", [ENOUGH - 1, ENOUGH, 40])
def test_one_that_misleads_does_not_count_however_large_it_is(amount: int, times: float, others: int) -> None:
    wrong = (amount, amount * times / 10_000)
    usual = [(500, 0.05)] * others
    assert measured(wrong, *usual) == measured(*usual, wrong) == pytest.approx(10_000)


def test_samples_that_took_no_time_say_nothing() -> None:
    assert measured(*[(300, 0.0), (300, -1.0), (0, 1.0)] * 5) == 0
    assert measured(*[(300, 0.0)] * 20, *[(300, 0.015)] * 3) == pytest.approx(20_000)


SAMPLES = st.lists(st.tuples(st.integers(1, LARGE), st.floats(1e-6, 100)), min_size=ENOUGH, max_size=2 * KEPT)


@given(SAMPLES)
def test_it_lies_among_the_samples_near_the_one_in_the_middle(samples: list[tuple[int, float]]) -> None:
    rates = sorted(amount / seconds for amount, seconds in samples[-KEPT:])
    middle = rates[len(rates) // 2]
    near = [rate for rate in rates if middle / OUTLIER * 0.999 <= rate <= middle * OUTLIER * 1.001]
    assert near[0] * 0.999 <= measured(*samples) <= near[-1] * 1.001
