"""Limits beside a model that counts in whole numbers, and in small steps."""

from math import floor

from hypothesis import given
from hypothesis import strategies as st

from router.tenants.keys import Key, digest_of
from router.tenants.limits import BUCKETS, DAY_S, KeyState, Limit, Use, limits_of

RATES = st.integers(1, 6000)
GAPS_S = st.lists(st.integers(0, 4000).map(lambda ms: ms / 1000), max_size=200)
REQUEST = Use(requests=1)


def key_with(**limits: float) -> Key:
    return Key(name="a", digest=digest_of("a"), **limits)  # type: ignore[arg-type]


def take(state: KeyState, limits: tuple[Limit, ...], use: Use, now_s: float, wall_s: float = 0.0) -> float:
    """Use it and return 0, or return the seconds until there is room."""
    lack = state.lacks(limits, use, now_s, wall_s)
    if lack is None:
        state.add(limits, use, now_s, wall_s)
        return 0.0
    return lack[1]


def times(gaps_s: list[float]) -> list[float]:
    now_s, made = 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        made.append(now_s)
    return made


@given(RATES, GAPS_S)
def test_it_decides_as_a_bucket_that_counts_in_whole_numbers(per_minute: int, gaps_s: list[float]) -> None:
    share = 6 * 60_000  # of a request; exact for milliseconds and sixths
    most = max(share, per_minute * share // 6)
    state, limits, level = KeyState.fresh(), limits_of(key_with(requests_per_minute=per_minute)), most
    now_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        level = min(most, level + round(gap_s * 1000) * per_minute * share // 60_000)
        taken = take(state, limits, REQUEST, now_s) == 0.0
        assert taken == (level >= share)
        level -= share * taken


@given(RATES, GAPS_S)
def test_a_retry_after_the_told_time_is_admitted_and_not_much_sooner(per_minute: int, gaps_s: list[float]) -> None:
    limits = limits_of(key_with(requests_per_minute=per_minute))
    for now_s in times(gaps_s):
        state = emptied(now_s)
        wait_s = take(state, limits, REQUEST, now_s)
        assert wait_s > 0
        early = emptied(now_s)
        assert take(early, limits, REQUEST, now_s + wait_s * 0.99) > 0
        assert take(state, limits, REQUEST, now_s + wait_s) == 0.0


def emptied(now_s: float) -> KeyState:
    state = KeyState.fresh()
    state.levels, state.filled_s = [0.0] * BUCKETS, [now_s] * BUCKETS
    return state


@given(RATES, RATES, GAPS_S)
def test_time_that_goes_backwards_gives_nothing(per_minute: int, other: int, gaps_s: list[float]) -> None:
    state = emptied(10_000.0)
    for now_s in times(gaps_s):
        assert take(state, limits_of(key_with(requests_per_minute=per_minute)), REQUEST, now_s) > 0
        assert take(state, limits_of(key_with(requests_per_minute=other)), REQUEST, now_s) > 0


STEPS = st.lists(
    st.tuples(
        st.integers(0, 90_000),  # milliseconds since the one before
        st.integers(0, 3000),  # prompt tokens
        st.integers(0, 3000),  # of these, predicted to be cached
        st.integers(0, 3000),  # those that are
        st.integers(0, 500),  # tokens generated
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 5000), st.integers(1, 20_000), st.sampled_from([0.0, 0.1, 0.25, 1.0]))
def test_tokens_are_counted_as_a_simple_model_counts_them(
    steps: list[tuple[int, int, int, int, int]], per_minute: int, per_day: int, weight: float
) -> None:
    """A request is charged its prompt before and the rest after; the overdraft is what it used unforeseen."""
    limits = limits_of(key_with(tokens_per_minute=per_minute, tokens_per_day=per_day, cached_token_weight=weight))
    state, now_s, wall_s = KeyState.fresh(), 0.0, 20_000.0 * DAY_S
    scale = 60_000 * 100  # whole numbers for milliseconds and hundredths of a token
    level, today, day = per_minute * scale, 0, 20_000
    for gap_ms, prompt, predicted, cached, generated in steps:
        predicted, cached = min(prompt, predicted), min(prompt, cached)
        now_s, wall_s = now_s + gap_ms / 1000, wall_s + gap_ms  # days pass faster
        level = min(per_minute * scale, level + gap_ms * per_minute * 100)
        if wall_s // DAY_S > day:
            day, today = int(wall_s // DAY_S), 0
        expected = Use(0, prompt - predicted, predicted)
        hundredths = 100 * expected.computed + round(100 * weight) * expected.cached
        least = max(100, hundredths)
        fits = level >= least * 60_000 and per_day * 100 - today >= least
        assert (take(state, limits, expected, now_s, wall_s) == 0.0) == fits
        if fits:
            used = Use(0, prompt - cached, cached, generated)
            state.add(limits, used.less(expected), now_s, wall_s)
            cost = 100 * (used.computed + generated) + round(100 * weight) * cached
            level = min(per_minute * scale, level - cost * 60_000)
            today += cost
            unforeseen = max(0, cost - hundredths)
            assert level >= -unforeseen * 60_000 and per_day * 100 - today >= -unforeseen
        by_minute, by_day = (state.left(limit, now_s, wall_s).remaining for limit in limits)
        assert by_minute == max(0, floor(level / scale))
        assert by_day == max(0, (per_day * 100 - today) // 100)
