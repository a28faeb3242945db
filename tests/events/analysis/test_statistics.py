"""The counts of `stat`: rates, blocks that come back, lag."""

import pytest

from events.analysis.statistics import Statistics
from events.cache.resolver import Resolver
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KnownEvent
from events.stream.actions import Apply
from events.stream.foreign_stream import ForeignStream
from events.view import CacheView


class Followed:
    """A view whose batches are given by hand."""

    def __init__(self) -> None:
        self.statistics, self.resolver = Statistics(), Resolver()
        self.view = CacheView("r", ForeignStream(), self.resolver)
        self.seq = 0

    def batch(self, ts: float, *events: KnownEvent, received_s: float | None = None) -> None:
        if received_s is not None:
            self.statistics.received("events", [b"", self.seq.to_bytes(8, "big"), b""], received_s)
        changes = self.resolver.apply(events)
        self.statistics.acted(Apply(self.seq, b""), EventBatch(ts, list(events)), changes)
        self.seq += 1


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [h for h in hashes for _ in range(2)], 2, None, "GPU", None)


def test_rates_are_over_the_time_of_the_stream() -> None:
    followed = Followed()
    followed.batch(10.0, stored(1, 2))
    followed.batch(12.0, BlockRemoved([2], "GPU"), stored(5))
    report = followed.statistics.report(followed.view)
    assert report["span_s"] == 2.0
    assert report["rates"] == {"batches": 1.0, "events": 1.5, "stored_blocks": 1.5, "removed_blocks": 0.5}
    assert report["resident"] == [{"medium": "GPU", "blocks": 2}]


def test_a_block_that_comes_back_is_counted_as_restored() -> None:
    followed = Followed()
    for _ in range(3):
        followed.batch(0.0, stored(1))
        followed.batch(1.0, BlockRemoved([1], "GPU"))
    assert followed.statistics.report(followed.view)["restored_blocks"] == 2


@pytest.mark.parametrize(
    ("delays", "note"),
    [([0.25, 0.3], None), ([0.1, -2.0], "clocks differ: a batch came 2 s before"), ([7.0, 9.0], "never below 7 s")],
)
def test_lag_is_of_live_batches_and_says_when_clocks_differ(delays: list[float], note: str | None) -> None:
    followed = Followed()
    followed.batch(0.0)  # replayed: no lag
    for index, delay_s in enumerate(delays):
        followed.batch(10.0 + index, received_s=10.0 + index + delay_s)
    lag = followed.statistics.report(followed.view)["lag"]
    assert lag is not None
    assert [lag["least_s"], lag["most_s"]] == pytest.approx([min(delays), max(delays)])
    assert (note is None and lag["note"] is None) or str(note) in str(lag["note"])


def test_a_clear_leaves_nothing_resident() -> None:
    followed = Followed()
    followed.batch(0.0, stored(1))
    followed.batch(1.0, AllBlocksCleared())
    assert followed.statistics.report(followed.view)["resident"] == []
