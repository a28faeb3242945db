"""Blocks, bytes, seconds and failures of reading from neighbours, or of being read."""

import threading
from collections import Counter


class Counts:
    """The sums of all peers; several threads add to them."""

    def __init__(self) -> None:
        self.blocks = 0
        self.bytes = 0
        self.seconds = 0.0
        self.failures: Counter[str] = Counter()  # by reason
        self._lock = threading.Lock()

    def add(self, payload_bytes: int) -> None:
        with self._lock:
            self.blocks += 1
            self.bytes += payload_bytes

    def took(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds

    def fail(self, reason: str) -> None:
        with self._lock:
            self.failures[reason] += 1
