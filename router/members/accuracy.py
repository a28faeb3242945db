"""Whether a replica's cache is what the index says: predicted against reported blocks, request by request."""

from collections import deque

WINDOW = 1000
FEWEST = 3  # differences within the window before anything is done
NEWEST = 0.1  # weight of the last answer in the share of claimed blocks that are found
TRUSTED = 0.7  # from this share on the claims count in full: evictions on the way are no lies
DISBELIEVED = 0.1  # below it they do not count at all


class Accuracy:
    """Of one replica. `differs_too_often` asks for its whole cache to be read again."""

    def __init__(self, objective: float = 0.999) -> None:
        self.objective = objective
        self.compared = 0
        self.different = 0
        self.error_blocks = 0  # sum of the absolute differences
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._recent_different = 0
        self._found = 1.0  # share of the blocks that its events claimed, by its newest answers

    @property
    def trust(self) -> float:
        """What its claims are multiplied by in a choice; 1 while they are mostly true."""
        if self._found >= TRUSTED:
            return 1.0
        return self._found if self._found >= DISBELIEVED else 0.0

    @property
    def recent(self) -> float:
        """The fraction of the last requests that were predicted to the block."""
        return 1 - self._recent_different / len(self._recent) if self._recent else 1.0

    @property
    def differs_too_often(self) -> bool:
        return self._recent_different >= FEWEST and self.recent < self.objective

    def compare(self, predicted_blocks: int, reported_blocks: int) -> bool:
        """True if they are the same."""
        same = predicted_blocks == reported_blocks
        self.compared += 1
        self.different += not same
        self.error_blocks += abs(predicted_blocks - reported_blocks)
        if len(self._recent) == WINDOW:
            self._recent_different -= not self._recent[0]
        self._recent.append(same)
        self._recent_different += not same
        return same

    def claimed(self, claimed_blocks: int, reported_blocks: int) -> None:
        """What its events alone let expect of an answer, and what it found; without a claim nothing is learned."""
        if claimed_blocks > 0:
            found = min(1.0, reported_blocks / claimed_blocks)
            self._found += NEWEST * (found - self._found)

    def forget(self) -> None:
        """The cache was read anew: what was wrong before says nothing about it."""
        self._recent.clear()
        self._recent_different = 0
