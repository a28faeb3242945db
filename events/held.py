"""Batches that came before their turn: bounded in number and in bytes."""


class HeldBatches(dict[int, bytes]):
    """Payloads by number. Add by `hold`, remove by `release` and `drop`."""

    def __init__(self, most_batches: int, most_bytes: int) -> None:
        super().__init__()
        self._most_batches = most_batches
        self._most_bytes = most_bytes
        self._bytes = 0
        self.dropped_to = -1  # the highest batch that had no room

    @property
    def highest(self) -> int:
        """The last batch that came, whether it had room or not; -1: none."""
        return max(self.dropped_to, max(self, default=-1))

    @property
    def missing_to(self) -> int:
        """The last batch before those held, or that had no room."""
        return min(self) - 1 if self else self.dropped_to

    def hold(self, seq: int, payload: bytes) -> bool:
        """Return False if there is no room."""
        if len(self) >= self._most_batches or self._bytes >= self._most_bytes:
            self.dropped_to = max(self.dropped_to, seq)
            return False
        self[seq] = payload
        self._bytes += len(payload)
        return True

    def release(self, seq: int) -> None:
        self._bytes -= len(self.pop(seq))

    def release_to(self, last: int) -> None:
        """Remove the batches up to `last`."""
        for seq in [seq for seq in self if seq <= last]:
            self.release(seq)

    def clear(self) -> None:
        super().clear()
        self._bytes, self.dropped_to = 0, -1
