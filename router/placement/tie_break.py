"""Tie-breaks of one decision: all draws follow from a seed, which is logged, so that a replay can draw them again."""

from collections.abc import Sequence

from msgspec import Struct
from xxhash import xxh3_64_intdigest

SEED_BITS = 53  # JSON's readers agree on integers of this size
_FRACTION = 2.0**-64


class TieBreak(Struct):
    number: int
    _drawn: int = 0

    def random(self) -> float:
        """Draw a number of at least 0 and less than 1."""
        self._drawn += 1
        # 53 bits: all 64 could be rounded up to 1.
        return (xxh3_64_intdigest(self.number.to_bytes(8, "little"), self._drawn) >> 11 << 11) * _FRACTION

    def choice(self, seq: Sequence[int], /) -> int:
        return seq[int(self.random() * len(seq))]
