"""Speed is learned from the duration of steps, rates from counters at two times."""

import random

import pytest

from events.native import Load
from replica.engine.rates import (
    FIRST_STEP_TOKENS,
    LEAST_STEP_TOKENS,
    MIN_PREFILL_TOKENS,
    SAMPLE_TOKENS,
    Speed,
    StepLimit,
    Window,
)
from replica.messages import PoolSnapshot, Rates, Stats


def stats(*, prompt_tokens: int = 0, generated_tokens: int = 0, **of_pool: int) -> Stats:
    pool = PoolSnapshot(total=10, **of_pool)
    return Stats(load=Load(), pool=pool, prompt_tokens=prompt_tokens, generated_tokens=generated_tokens)


# ---- speed


def test_decode_speed_is_that_of_one_request_whatever_the_batch() -> None:
    speed = Speed()
    for _ in range(3):
        speed.add(0, 0.025)
    assert speed.decode_tokens_per_s == pytest.approx(40)


def test_the_part_of_a_step_that_every_step_takes_is_not_the_prefills() -> None:
    speed = Speed()
    speed.add(0, 0.02)
    for _ in range(3):
        speed.add(1000, 0.52)
    assert speed.prefill_tokens_per_s == pytest.approx(2000)
    assert speed.decode_tokens_per_s == pytest.approx(50)


def test_the_speed_of_short_prompts_is_that_of_long_ones() -> None:
    """A step of 40 tokens is hardly longer than one of none, and that is all that prompts with a warm prefix give."""
    speed = Speed()
    for _ in range(40):
        speed.add(0, 0.02)
        speed.add(40, 0.025)
    assert speed.prefill_tokens_per_s == pytest.approx(8000)


def test_a_batch_that_shrinks_does_not_make_its_prompts_seem_fast() -> None:
    """It is known a while later what every step takes."""
    speed, found = Speed(), set()
    for step_s in [0.032] * 100 + [0.020] * 200:
        for _ in range(5):
            speed.add(0, step_s)
        speed.add(40, step_s + 0.005)
        found.add(speed.prefill_tokens_per_s)
    assert all(rate == pytest.approx(8000, rel=0.4) for rate in found - {0})
    assert speed.prefill_tokens_per_s == pytest.approx(8000, rel=0.4)


def test_a_few_short_prompts_do_not_seem_infinitely_fast() -> None:
    speed = Speed()
    speed.add(0, 0.02)
    for _ in range(10):
        speed.add(40, 0.0201)
    assert speed.prefill_tokens_per_s == 0


def test_the_growth_of_a_step_is_learned_from_batches_of_different_sizes() -> None:
    speed, chance = Speed(), random.Random(0)
    for _ in range(2000):
        answers = chance.randint(1, 8)
        speed.add(0, chance.gauss(0.015 + 0.004 * answers, 0.002), answers)
    assert speed.growth_s == pytest.approx(0.004, rel=0.15)
    speed.add(0, 30.0, 8)  # interrupted
    assert speed.growth_s == pytest.approx(0.004, rel=0.25)


def test_a_step_that_was_interrupted_does_not_make_it_slow() -> None:
    speed = Speed()
    for duration_s in (3.0, 0.1, 0.1, 0.1, 2.0, 0.1, 0.1, 0.1):
        speed.add(SAMPLE_TOKENS, duration_s)
    assert speed.prefill_tokens_per_s == pytest.approx(10 * SAMPLE_TOKENS)


# ---- window


def test_rates_are_the_change_of_the_counters_by_the_time_between() -> None:
    window = Window(span_s=10)
    window.add(100.0, stats(query_tokens=50, hit_tokens=50, evictions=3, prompt_tokens=7, generated_tokens=9))
    now = stats(query_tokens=150, hit_tokens=75, evictions=7, prompt_tokens=47, generated_tokens=29, referenced=5)
    assert window.add(104.0, now) == Rates(
        window_s=4.0,
        token_hit_rate=0.25,
        evictions_per_s=1.0,
        utilization=0.5,
        prompt_tokens_per_s=10.0,
        generated_tokens_per_s=5.0,
    )


def test_what_is_older_than_the_window_does_not_count() -> None:
    window = Window(span_s=10)
    for second in range(101):
        rates = window.add(float(second), stats(generated_tokens=0 if second < 50 else 100))
        assert rates.window_s <= 10
    assert rates.window_s == 10
    assert rates.generated_tokens_per_s == 0.0
    assert len(window._past) <= 12


# ---- the limit of a step


def test_a_step_takes_what_the_last_one_would_have_computed_in_time_in_whole_tiles() -> None:
    limit = StepLimit(0.5)
    assert limit.tokens == FIRST_STEP_TOKENS
    limit.add(256, 0.8)  # 160 in time
    assert limit.tokens == 128


def test_every_step_of_a_prompt_stays_near_the_limit_though_tokens_become_dearer() -> None:
    limit, done, longest_s = StepLimit(0.5), 0, 0.0
    while done < 100_000:
        assert limit.tokens is not None
        duration_s = limit.tokens * (0.001 + done * 2e-8)  # the last token takes 3 times as long as the first
        limit.add(limit.tokens, duration_s)
        done += limit.tokens
        longest_s = max(longest_s, duration_s)
    assert longest_s < 0.6


def test_the_limit_grows_by_steps_and_has_a_floor() -> None:
    limit = StepLimit(1.0)
    limit.add(256, 0.001)
    assert limit.tokens == 512
    limit.add(512, 1000.0)
    assert limit.tokens == LEAST_STEP_TOKENS
    limit.add(MIN_PREFILL_TOKENS - 1, 1e-6)  # says nothing about prefill
    assert limit.tokens == LEAST_STEP_TOKENS
