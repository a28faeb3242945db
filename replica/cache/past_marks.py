"""The marks of retained blocks that the pool gave up, for when their contents are used again.

They go in the order in which they came. So do the contents below the pool, so that a mark for each slot is enough.
"""

from collections.abc import Sequence

from replica.cache.retention import Mark


class PastMarks:
    """At most `limit` marks, by the identity of their contents."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._marks: dict[int, Mark] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, identities: Sequence[int], marks: Sequence[Mark]) -> None:
        for identity, mark in zip(identities, marks, strict=True):
            self._marks.pop(identity, None)
            self._marks[identity] = mark
        while len(self._marks) > self.limit:
            del self._marks[next(iter(self._marks))]

    def take(self, identities: Sequence[int], now_s: float) -> list[Mark | None]:
        """Forget the marks of these contents; return each one whose time is not over."""
        marks = [self._marks.pop(identity, None) for identity in identities]
        return [mark if mark is not None and mark.deadline_s > now_s else None for mark in marks]

    def clear(self) -> None:
        self._marks.clear()
