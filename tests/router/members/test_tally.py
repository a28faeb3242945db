"""Histograms in Prometheus' format."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.prometheus import FIRST_TOKEN_S, Histogram
from router.members.tally import SEEN_NUMBERS, Memory, Seen, Tally

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

BLOCK = 16


def test_a_prompt_that_comes_again_is_resent_as_a_whole() -> None:
    tally = Tally(Memory())
    keys = list(range(1, 101))
    tally.sent(keys, BLOCK, None)
    assert tally.resent_tokens == 0
    tally.sent(keys, BLOCK, None)
    assert tally.resent_tokens == 100 * BLOCK


@given(st.integers(0, 300), st.integers(0, 300))
def test_of_a_shared_beginning_at_least_two_thirds_count_and_nothing_beyond(shared: int, rest: int) -> None:
    tally = Tally(Memory())
    for first in (1000, 2000):
        tally.sent([*range(1, shared + 1), *range(first, first + rest)], BLOCK, None)
    assert shared * BLOCK * 2 // 3 <= tally.resent_tokens <= shared * BLOCK


def test_what_another_replica_was_sent_is_not_resent() -> None:
    one, other = Tally(Memory()), Tally(Memory())
    one.sent([1, 2, 3], BLOCK, None)
    other.sent([1, 2, 3], BLOCK, None)
    assert other.resent_tokens == 0


def test_a_replicas_models_share_one_table_and_count_each_for_itself() -> None:
    """Tables are what a tally is large by, and adapters are many."""
    memory = Memory()
    tallies = [Tally(memory) for _ in range(100)]
    tracemalloc.start()
    try:
        for number, tally in enumerate(tallies):
            for _ in range(2):
                tally.sent([3 * number + 1, 3 * number + 2], BLOCK, (f"model-{number}", "salt"))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 4 * 8 * SEEN_NUMBERS
    assert {tally.resent_tokens for tally in tallies} == {2 * BLOCK}
    assert {(tally.salted, tally.new_salts) for tally in tallies} == {(2, 1)}


def test_a_salt_is_new_once() -> None:
    tally = Tally(Memory())
    for salt in ("a", "b", "a", None, "b", "c"):
        tally.sent([], BLOCK, salt)
    assert (tally.salted, tally.new_salts) == (5, 3)


def test_what_is_remembered_does_not_grow() -> None:
    seen = Seen()
    for number in range(3 * SEEN_NUMBERS):
        seen.add(number)
    assert seen.add(3 * SEEN_NUMBERS - 1)
    assert not seen.add(0)
