"""A time series of the newest points, in a ring buffer of fixed size."""

import math
from array import array
from collections.abc import Sequence

DIGITS = 6  # of a four-byte float


class Series:
    """A few values over time. Unknown values are None, stored as NaN."""

    __slots__ = ("_at_s", "_most", "_next", "_values", "names")

    def __init__(self, names: tuple[str, ...], most: int) -> None:
        self.names = names
        self._most = most
        self._at_s = array("d")
        self._values = array("f")  # point by point
        self._next = 0  # position of the next point once the ring is full

    def __len__(self) -> int:
        return len(self._at_s)

    def add(self, at_s: float, values: Sequence[float | None]) -> None:
        point = array("f", [math.nan if value is None else value for value in values])
        if len(self._at_s) < self._most:
            self._at_s.append(at_s)
            self._values += point
            return
        width = len(self.names)
        self._at_s[self._next] = at_s
        self._values[self._next * width : (self._next + 1) * width] = point
        self._next = (self._next + 1) % self._most

    def columns(self) -> dict[str, list[float | None]]:
        """Times under `at` and values under their names, oldest first."""
        at_s = [*self._at_s[self._next :], *self._at_s[: self._next]]
        columns: dict[str, list[float | None]] = {"at": [round(one, 3) for one in at_s]}
        width = len(self.names)
        for place, name in enumerate(self.names):
            column = self._values[place::width]
            columns[name] = [
                float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
                for value in (*column[self._next :], *column[: self._next])
            ]
        return columns

    def check(self) -> None:
        assert len(self._values) == len(self._at_s) * len(self.names)
        assert len(self._at_s) <= self._most
        assert 0 <= self._next < self._most
        assert not self._next or len(self._at_s) == self._most, "it turns before it is full"
