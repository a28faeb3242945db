"""Predictions held against the cached tokens that replicas report: request by request, and each replica's accuracy.

An engine publishes what it has stored and evicted a step late, so a prediction may differ although the index was true
as far as anybody could know. Such a difference is explained by an event that comes after the prediction: the block at
which the two part was stored or removed. So a difference is judged once these events have come.
"""

from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from router.members.feed import Moment, ReplicaFeed
from router.placement.decision import Prediction

WINDOW = 1000
FEWEST = 3  # differences within the window before anything is done
NEWEST = 0.1  # weight of the last answer in the share of claimed blocks that are found
TRUSTED = 0.7  # claims count in full from this share on: evictions on the way are no lies
DISBELIEVED = 0.1  # below it they do not count at all
JUDGED_AFTER_S = 0.5  # the events of an answer's time have usually come by then
JUDGED_WITHIN_S = 12.0  # an idle stream is probed every ten seconds at least
MAX_OPEN = 256  # beyond these, the oldest is not judged


class Accuracy:
    """The accuracy of one replica's predictions. If it `differs_too_often`, read its whole cache again."""

    def __init__(self, objective: float = 0.999) -> None:
        self.objective = objective
        self.compared = 0
        self.different = 0  # those that nothing explains
        self.explained = 0  # different, but by what the replica published after the prediction
        self.error_blocks = 0  # sum of the absolute differences
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._recent_different = 0
        self._found = 1.0  # share of claimed blocks that its newest answers found
        self._true = 1.0  # the same, but what its events explain counts as found

    @property
    def trust(self) -> float:
        """Factor on its claims in a choice; 1 while they mostly hold, for whatever reason they do not."""
        return _factor(self._found)

    @property
    def honesty(self) -> float:
        """The same for people: 1 while its claims are mostly true, or its later events say why they were not."""
        return _factor(self._true)

    @property
    def recent(self) -> float:
        """The fraction of the last requests that were predicted to the block."""
        return 1 - self._recent_different / len(self._recent) if self._recent else 1.0

    @property
    def differs_too_often(self) -> bool:
        return self._recent_different >= FEWEST and self.recent < self.objective

    def compare(self, predicted_blocks: int, reported_blocks: int, *, explained: bool = False) -> bool:
        """Compare the blocks of one request; return True if they are the same, or the difference is explained."""
        same = explained or predicted_blocks == reported_blocks
        self.compared += 1
        self.explained += explained
        if explained:
            reported_blocks = predicted_blocks
        self.different += not same
        self.error_blocks += abs(predicted_blocks - reported_blocks)
        if len(self._recent) == WINDOW:
            self._recent_different -= not self._recent[0]
        self._recent.append(same)
        self._recent_different += not same
        return same

    def claimed(self, claimed_blocks: int, reported_blocks: int) -> None:
        """Learn from the blocks claimed by events alone and the blocks found; without a claim, learn nothing."""
        if claimed_blocks > 0:
            found = min(1.0, reported_blocks / claimed_blocks)
            self._found += NEWEST * (found - self._found)

    def judged(self, claimed_blocks: int, reported_blocks: int, *, explained: bool = False) -> None:
        """Learn whether a claim was true, once all is known that may explain another finding."""
        if claimed_blocks > 0:
            true = 1.0 if explained else min(1.0, reported_blocks / claimed_blocks)
            self._true += NEWEST * (true - self._true)

    def forget(self) -> None:
        """Forget earlier differences, as the cache was read again."""
        self._recent.clear()
        self._recent_different = 0


def _factor(share: float) -> float:
    return 1.0 if share >= TRUSTED else share if share >= DISBELIEVED else 0.0


class Difference(Struct, frozen=True, gc=False):
    """A prediction that was called exact, and another number of cached blocks."""

    name: str
    accuracy: Accuracy
    feed: ReplicaFeed | None
    prediction: Prediction
    since: Moment
    reported_blocks: int
    keys: Sequence[int]  # keys of the blocks at which they part, which may explain it
    ended_s: float
    due_s: float

    def judge(self, *, explained: bool = False) -> None:
        """Note whether the claim in it was true."""
        claimed = self.prediction.claimed_blocks
        if self.reported_blocks < claimed:  # else it was noted before
            self.accuracy.judged(claimed, self.reported_blocks, explained=explained)


class Predictions:
    """`on_wrong` gets the name of a replica whose sure prediction was wrong."""

    def __init__(self, on_wrong: Callable[[str], None]) -> None:
        self._on_wrong = on_wrong
        self._open: deque[Difference] = deque(maxlen=MAX_OPEN)

    def compare(
        self,
        name: str,
        accuracy: Accuracy,
        feed: ReplicaFeed | None,
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
        if not since.exact:  # the prediction was no claim, but the blocks found are there
            if reported_blocks and feed is not None:
                feed.found(since, list(keys[:reported_blocks]), sure=sure)
            return
        if reported_blocks >= prediction.claimed_blocks:
            accuracy.judged(prediction.claimed_blocks, reported_blocks)
        if reported_blocks == prediction.blocks:
            accuracy.compare(prediction.blocks, reported_blocks)
            return
        part, last = min(reported_blocks, prediction.blocks), max(reported_blocks, prediction.blocks)
        # A hit in several groups needs blocks of every group, and a window does not need the first ones.
        may_explain = keys[:last] if feed is not None and feed.has_groups else keys[part : part + 1]
        told = name, accuracy, feed, prediction, since, reported_blocks, may_explain
        self._open.append(Difference(*told, now_s, now_s + JUDGED_AFTER_S))

    def settle(self, now_s: float) -> None:
        """Judge differences whose explanation must have come by now."""
        for _ in range(len(self._open)):
            if self._open[0].due_s > now_s:
                return
            one = self._open.popleft()
            prediction, reported = one.prediction, one.reported_blocks
            blocks = prediction.blocks
            changed: bool | None = True
            if reported > blocks:
                is_awaited = prediction.pulls  # more blocks than predicted may have come from a neighbour
            else:  # only blocks are missing that another request was about to store, or that were to be brought
                is_awaited = prediction.claimed_blocks - prediction.brought_blocks <= reported < blocks
            if not is_awaited:
                feed = one.feed
                changed = None if feed is None else feed.has_changed(one.since, one.keys, stored=reported > blocks)
            if changed:
                one.accuracy.compare(blocks, reported, explained=True)
                one.judge(explained=True)
            elif changed is None:  # the cache was read again, or much has happened
                continue
            elif one.feed is None or one.feed.is_settled(one.ended_s):
                one.judge()
                same = one.accuracy.compare(blocks, reported)
                if not same and prediction.sure and prediction.alone:
                    self._on_wrong(one.name)
            elif now_s - one.ended_s <= JUDGED_WITHIN_S:
                self._open.append(replace(one, due_s=now_s + JUDGED_AFTER_S))
            else:
                one.judge()  # silence explains nothing
