"""Batches that came before their turn, and the digests of those applied last: bounded in number and in bytes."""

from array import array

from xxhash import xxh3_64_intdigest


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
        if len(self) >= self._most_batches or self._bytes >= self._most_bytes:
            self.dropped_to = max(self.dropped_to, seq)
            return False
        self[seq] = payload
        self._bytes += len(payload)
        return True

    def release(self, seq: int) -> None:
        self._bytes -= len(self.pop(seq))

    def release_to(self, last: int) -> None:
        for seq in [seq for seq in self if seq <= last]:
            self.release(seq)

    def clear(self) -> None:
        super().clear()
        self._bytes, self.dropped_to = 0, -1


class PayloadMemory:
    """Digests of the payloads applied last, by sequence number, in a ring."""

    def __init__(self, size: int) -> None:
        self._digests = array("Q", bytes(8 * size))
        self.clear()

    def clear(self) -> None:
        self._first = self._next = 0

    def add(self, seq: int, payload: bytes) -> None:
        size = len(self._digests)
        if self._first == self._next or seq < self._next or seq - self._next >= size:
            self._first = self._next = seq
        for lost in range(self._next, seq):
            self._digests[lost % size] = 0
        self._digests[seq % size] = xxh3_64_intdigest(payload)
        self._next = seq + 1
        self._first = max(self._first, self._next - size)

    def __contains__(self, seq: int) -> bool:
        return self._first <= seq < self._next and self._digests[seq % len(self._digests)] != 0

    def matches(self, seq: int, payload: bytes) -> bool:
        return seq in self and self._digests[seq % len(self._digests)] == xxh3_64_intdigest(payload)

    def __bool__(self) -> bool:
        return self._first < self._next
