"""The token bucket beside a model that refills in small steps, and never more than it may."""

from hypothesis import given
from hypothesis import strategies as st

from router.tenants.limits import BURST, Bucket

RATES = st.integers(1, 6000)
GAPS_S = st.lists(st.integers(0, 4000).map(lambda ms: ms / 1000), max_size=200)


def allowed(per_minute: float, times_s: list[float]) -> list[float]:
    bucket = Bucket(float("inf"), 0.0)
    return [now_s for now_s in times_s if bucket.take(per_minute, now_s) == 0.0]


def times(gaps_s: list[float]) -> list[float]:
    now_s, made = 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        made.append(now_s)
    return made


@given(RATES, GAPS_S)
def test_in_no_stretch_of_time_more_is_allowed_than_rate_and_burst(per_minute: int, gaps_s: list[float]) -> None:
    passed = allowed(per_minute, times(gaps_s))
    burst = max(1.0, per_minute * BURST)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + (passed[last] - passed[first]) * per_minute / 60 + 1e-6


@given(RATES, GAPS_S)
def test_it_decides_as_a_bucket_that_counts_in_whole_numbers(per_minute: int, gaps_s: list[float]) -> None:
    share = 6 * 60_000  # of a token; exact for milliseconds and sixths
    most = max(share, per_minute * share // 6)
    bucket, level = Bucket(float("inf"), 0.0), most
    now_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        level = min(most, level + round(gap_s * 1000) * per_minute * share // 60_000)
        taken = bucket.take(per_minute, now_s) == 0.0
        assert taken == (level >= share)
        level -= share * taken


@given(RATES, GAPS_S)
def test_a_retry_after_the_told_time_is_admitted_and_not_much_sooner(per_minute: int, gaps_s: list[float]) -> None:
    for now_s in times(gaps_s):
        bucket = Bucket(0.0, now_s)
        wait_s = bucket.take(per_minute, now_s)
        assert wait_s > 0
        assert Bucket(bucket.tokens, now_s).take(per_minute, now_s + wait_s * 0.99) > 0
        assert bucket.take(per_minute, now_s + wait_s) == 0.0


@given(RATES, RATES, GAPS_S)
def test_time_that_goes_backwards_gives_nothing(per_minute: int, other: int, gaps_s: list[float]) -> None:
    bucket = Bucket(0.0, 10_000.0)
    for now_s in times(gaps_s):
        assert bucket.take(per_minute, now_s) > 0
        assert bucket.take(other, now_s) > 0
