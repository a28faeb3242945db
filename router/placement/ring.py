"""A consistent-hash ring: a replica that comes or goes moves only its share of the sessions.

Points are xxh3 of name and number, so every router draws the same ring.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from xxhash import xxh3_64_intdigest

POINTS = 128  # per replica: shares differ by about 1/sqrt(POINTS)


class Ring:
    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = set(names)
        self._points = sorted((_point(f"{name}#{number}"), name) for name in self._names for number in range(POINTS))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        if name not in self._names:
            self._names.add(name)
            for number in range(POINTS):
                insort(self._points, (_point(f"{name}#{number}"), name))

    def remove(self, name: str) -> None:
        if name in self._names:
            self._names.remove(name)
            self._points = [point for point in self._points if point[1] != name]

    def walk(self, session: str) -> Iterator[str]:
        """Each replica once, in the order of the ring from the session's point on."""
        points = self._points
        start = bisect_left(points, (_point(session), ""))
        seen: set[str] = set()
        for index in range(start, start + len(points)):
            name = points[index % len(points)][1]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == len(self._names):
                    return


def _point(text: str) -> int:
    return xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
