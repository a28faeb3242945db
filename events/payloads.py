"""The payloads applied last, remembered by digest."""

from array import array

from xxhash import xxh3_64_intdigest


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
