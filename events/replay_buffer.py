"""The newest batches, as a replay sends them again: bounded in number and in bytes."""

from bisect import bisect_left
from collections.abc import Iterator

import zmq


class ReplayBuffer:
    """Drops the oldest first. A payload is one ZeroMQ message, whose bytes all receivers share."""

    def __init__(self, most_batches: int, most_bytes: int) -> None:
        self.kept_bytes = 0
        self._most_batches = most_batches
        self._most_bytes = most_bytes
        self._batches: dict[int, tuple[int, zmq.Frame]] = {}  # by position: numbers have holes, positions do not
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    def append(self, seq: int, payload: zmq.Frame) -> None:
        self._batches[self._end] = seq, payload
        self._end += 1
        self.kept_bytes += len(payload)
        while self.kept_bytes > self._most_bytes or len(self) > self._most_batches:
            _, dropped = self._batches.pop(self._first)
            self._first += 1
            self.kept_bytes -= len(dropped)

    def since(self, start: int) -> Iterator[tuple[int, zmq.Frame]]:
        """Yield batches from `start` to the current newest; batches dropped meanwhile are left out."""
        end = self._end
        position = bisect_left(range(self._first, end), start, key=lambda at: self._batches[at][0]) + self._first
        while (position := max(position, self._first)) < end:
            yield self._batches[position]
            position += 1
