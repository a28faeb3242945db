"""Predictions held against the cached tokens that replicas report.

An engine publishes what it has stored and evicted a step late, so a prediction may differ although the index was true
as far as anybody could know. Such a difference is explained by an event that comes after the prediction: the block at
which the two part was stored or removed. So a difference is judged once these events have come.
"""

from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from router.members.accuracy import Accuracy
from router.members.feed import Moment
from router.members.feeds import Feeds
from router.placement.decision import Prediction

JUDGED_AFTER_S = 0.5  # by then, the events of an answer's time have usually come
JUDGED_WITHIN_S = 12.0  # an idle stream is probed every ten seconds at least
MOST_OPEN = 256  # beyond these, the oldest is not judged


class Difference(Struct, frozen=True, gc=False):
    """A prediction that was called exact, and another number of cached blocks."""

    name: str
    accuracy: Accuracy
    prediction: Prediction
    since: Moment
    reported_blocks: int
    keys: Sequence[int]  # of the blocks that may explain it: the one at which they part
    ended_s: float
    due_s: float

    @property
    def is_awaited(self) -> bool:
        """True if only blocks are missing that another request was about to store, or that were to be brought.

        More blocks than predicted may have come from a neighbour.
        """
        prediction = self.prediction
        if self.reported_blocks > prediction.blocks:
            return prediction.pulls
        return prediction.claimed_blocks - prediction.brought_blocks <= self.reported_blocks < prediction.blocks

    def judge(self, *, explained: bool = False) -> None:
        """Note whether the claim in it was true."""
        claimed = self.prediction.claimed_blocks
        if self.reported_blocks < claimed:  # else it was noted before
            self.accuracy.judged(claimed, self.reported_blocks, explained=explained)


class Predictions:
    """`on_wrong` gets the name of a replica whose sure prediction was wrong."""

    def __init__(self, feeds: Feeds, on_wrong: Callable[[str], None]) -> None:
        self._feeds = feeds
        self._on_wrong = on_wrong
        self._open: deque[Difference] = deque(maxlen=MOST_OPEN)

    def compare(
        self,
        name: str,
        accuracy: Accuracy,
        prediction: Prediction,
        since: Moment,
        reported_blocks: int,
        keys: Sequence[int],
        now_s: float,
        *,
        sure: bool = False,
    ) -> None:
        """Compare the report of an answer that has ended.

        `since`: when it was predicted. `sure`: the keys are exact.
        """
        accuracy.claimed(prediction.claimed_blocks, reported_blocks)
        if not since.exact:  # the prediction was no claim; but what was found there is there
            if reported_blocks:
                self._feeds.found(name, since, list(keys[:reported_blocks]), sure=sure)
            return
        if reported_blocks >= prediction.claimed_blocks:
            accuracy.judged(prediction.claimed_blocks, reported_blocks)
        if reported_blocks == prediction.blocks:
            accuracy.compare(prediction.blocks, reported_blocks)
            return
        part, last = min(reported_blocks, prediction.blocks), max(reported_blocks, prediction.blocks)
        # With groups, a hit needs blocks of every group, and a window does not need the first ones.
        may_explain = keys[:last] if self._feeds.has_groups(name) else keys[part : part + 1]
        self._open.append(
            Difference(name, accuracy, prediction, since, reported_blocks, may_explain, now_s, now_s + JUDGED_AFTER_S)
        )

    def settle(self, now_s: float) -> None:
        """Judge differences whose explanation must have come by now."""
        for _ in range(len(self._open)):
            if self._open[0].due_s > now_s:
                return
            one = self._open.popleft()
            blocks, reported = one.prediction.blocks, one.reported_blocks
            changed: bool | None = True
            if not one.is_awaited:
                changed = self._feeds.has_changed(one.name, one.since, one.keys, stored=reported > blocks)
            if changed:
                one.accuracy.compare(blocks, reported, explained=True)
                one.judge(explained=True)
            elif changed is None:  # the cache was read again, or much has happened
                continue
            elif self._feeds.is_settled(one.name, one.ended_s):
                one.judge()
                same = one.accuracy.compare(blocks, reported)
                if not same and one.prediction.sure and one.prediction.alone:
                    self._on_wrong(one.name)
            elif now_s - one.ended_s <= JUDGED_WITHIN_S:
                self._open.append(replace(one, due_s=now_s + JUDGED_AFTER_S))
            else:
                one.judge()  # silence explains nothing
