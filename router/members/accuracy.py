"""Accuracy of the index for one replica: predicted against reported blocks, request by request."""

from collections import deque

WINDOW = 1000
FEWEST = 3  # differences within the window before anything is done
NEWEST = 0.1  # weight of the last answer in the share of claimed blocks that are found
TRUSTED = 0.7  # from this share on the claims count in full: evictions on the way are no lies
DISBELIEVED = 0.1  # below it they do not count at all


class Accuracy:
    """The accuracy of one replica's predictions. If it `differs_too_often`, read its whole cache again."""

    def __init__(self, objective: float = 0.999) -> None:
        self.objective = objective
        self.compared = 0
        self.different = 0  # without an explanation
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
