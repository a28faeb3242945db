"""What reading blocks from neighbours, or being read, has brought and cost."""

import threading
from collections import Counter


class Counts:
    """Of all peers; its writers are threads."""

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
