"""The counts of `stat`: lifetimes with censored blocks, rates, lag."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.analysis.statistics import Lifetimes, Statistics
from events.analysis.tree import Tree
from events.cache.resolver import Resolver
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KnownEvent
from events.stream.actions import Apply
from events.stream.foreign_stream import ForeignStream
from events.view import CacheView


def close(seconds: float) -> object:
    """Ages are kept in buckets of 5 %."""
    return pytest.approx(seconds, rel=0.05)


def test_quantiles_without_censored_blocks_are_those_of_the_ages() -> None:
    lives = Lifetimes()
    for key, age_s in enumerate([1.0, 2.0, 3.0, 4.0]):
        lives.stored("GPU", [key], 0.0)
        lives.removed("GPU", [key], age_s)
    assert lives.quantiles([0.25, 0.5, 1.0], 100.0) == [close(1), close(2), close(4)]


def test_a_resident_block_counts_as_at_least_this_old() -> None:
    """Kaplan-Meier by hand: 1 of 4 gone at 1 s; one censored at 2 s; at 3 s 1 of the 2 left: (1-1/4)(1-1/2) stay."""
    lives = Lifetimes()
    lives.stored("GPU", [1, 2, 3], 0.0)
    lives.stored("GPU", [4], 8.0)
    lives.removed("GPU", [1], 1.0)
    lives.removed("GPU", [2], 3.0)
    assert lives.quantiles([0.25, 0.6, 0.7], 10.0) == [close(1), close(3), None]
    assert (lives.ended, lives.censored()) == (2, 2)


def test_a_clear_ends_no_life() -> None:
    lives = Lifetimes()
    lives.stored("GPU", [1, 2], 0.0)
    lives.removed("GPU", [1], 1.0)
    lives.cleared(5.0)
    assert (lives.ended, lives.censored()) == (1, 1)
    assert lives.quantiles([0.5, 0.9], 5.0) == [close(1), None]


def test_blocks_that_were_there_before_have_no_age() -> None:
    lives = Lifetimes()
    lives.stored("GPU", [1], None)
    lives.removed("GPU", [1], 1.0)
    assert (lives.ended, lives.without_start, lives.quantiles([0.5], 2.0)) == (0, 1, [None])


def test_a_block_that_comes_back_is_counted_as_restored() -> None:
    lives = Lifetimes()
    for _ in range(3):
        lives.stored("GPU", [1], 0.0)
        lives.removed("GPU", [1], 1.0)
    assert lives.restored == 2


@given(st.lists(st.tuples(st.floats(0.001, 1000), st.booleans())), st.floats(0.01, 0.99))
def test_quantiles_grow_with_their_fraction(ages: list[tuple[float, bool]], fraction: float) -> None:
    lives = Lifetimes()
    for key, (age_s, evicted) in enumerate(ages):
        lives.stored("GPU", [key], 1000 - age_s)
        if evicted:
            lives.removed("GPU", [key], 1000.0)
    lower, upper = lives.quantiles([fraction / 2, fraction], 1000.0)
    assert upper is None or (lower is not None and lower <= upper)


class Followed:
    """A view whose batches are given by hand."""

    def __init__(self) -> None:
        self.statistics, self.tree, self.resolver = Statistics(), Tree(), Resolver()
        self.view = CacheView("r", ForeignStream(), self.resolver)
        self.seq = 0

    def batch(self, ts: float, *events: KnownEvent, received_s: float | None = None) -> None:
        at_s = ts if received_s is None else received_s
        if received_s is not None:
            self.statistics.received("events", [b"", self.seq.to_bytes(8, "big"), b""], at_s)
        changes = self.resolver.apply(events)
        self.tree.apply("r", changes, ts)
        self.statistics.acted(Apply(self.seq, b""), EventBatch(ts, list(events)), changes, at_s)
        self.seq += 1


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [h for h in hashes for _ in range(2)], 2, None, "GPU", None)


def test_rates_are_over_the_time_of_the_stream() -> None:
    followed = Followed()
    followed.batch(10.0, stored(1, 2))
    followed.batch(12.0, BlockRemoved([2], "GPU"), stored(5))
    report = followed.statistics.report(followed.view, followed.tree)
    assert report["span_s"] == 2.0
    assert report["rates"] == {"batches": 1.0, "events": 1.5, "stored_blocks": 1.5, "removed_blocks": 0.5}
    assert report["resident"] == [{"medium": "GPU", "blocks": 2, "tokens": 4}]
    assert report["lives"]["p50_s"] == close(2)


@pytest.mark.parametrize(
    ("delays", "note"),
    [([0.25, 0.3], None), ([0.1, -2.0], "clocks differ: a batch came 2 s before"), ([7.0, 9.0], "never below 7 s")],
)
def test_lag_is_of_live_batches_and_says_when_clocks_differ(delays: list[float], note: str | None) -> None:
    followed = Followed()
    followed.batch(0.0)  # replayed: no lag
    for index, delay_s in enumerate(delays):
        followed.batch(10.0 + index, received_s=10.0 + index + delay_s)
    lag = followed.statistics.report(followed.view, followed.tree)["lag"]
    assert lag is not None
    assert [lag["least_s"], lag["most_s"]] == pytest.approx([min(delays), max(delays)])
    assert (note is None and lag["note"] is None) or str(note) in str(lag["note"])


def test_a_clear_leaves_nothing_resident() -> None:
    followed = Followed()
    followed.batch(0.0, stored(1))
    followed.batch(1.0, AllBlocksCleared())
    assert followed.statistics.report(followed.view, followed.tree)["resident"] == []
