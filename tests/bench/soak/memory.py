"""Memory of processes over time: read from /proc, kept as CSV, fitted, drawn.

The fitted and drawn figure is anonymous memory, which is a process's own. RSS also counts pages of programs and
libraries, which the system drops and reads again at will.
"""

import csv
import statistics
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, TextIO

from tests.bench.drawing import drawing

MB = 10**6
SETTLED_S = 600.0  # growth before that is caches that fill
PAIRS_OF = 240  # points at most, whose pairs a slope is fitted to
FIELDS = ("Rss", "Pss", "Anonymous")


class Sample(NamedTuple):
    """Bytes of one process."""

    at_s: float
    process: str
    rss: int
    pss: int
    anonymous: int


class Growth(NamedTuple):
    """Memory growth of one process, in MB."""

    process: str
    start: float
    settled: float
    end: float
    most: float
    per_10_minutes: float | None  # None: the process did not run for long enough


def held_by(pid: int) -> tuple[int, int, int]:
    """RSS, PSS and anonymous memory of a process, in bytes."""
    found = dict.fromkeys(FIELDS, 0)
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * 1024
    return found["Rss"], found["Pss"], found["Anonymous"]


class Samples(list[Sample]):
    """Samples that are also written to a file as they are taken."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        csv.writer(file).writerow(Sample._fields)

    def take(self, at_s: float, processes: dict[str, int]) -> None:
        taken = [Sample(round(at_s, 1), name, *held_by(pid)) for name, pid in processes.items()]
        self += taken
        csv.writer(self._file).writerows(taken)
        self._file.flush()


def growth(samples: Sequence[Sample], settled_s: float = SETTLED_S) -> list[Growth]:
    return [_growth(name, points, settled_s) for name, points in by_process(samples).items()]


def _growth(name: str, points: list[tuple[float, float]], settled_s: float) -> Growth:
    later = [point for point in points if point[0] >= settled_s]
    sizes = [size for _, size in points]
    slope = slope_of(later) * 600 if len(later) > 2 else None
    settled = later[0][1] if later else sizes[-1]
    return Growth(name, sizes[0], settled, sizes[-1], max(sizes), slope)


def by_process(samples: Sequence[Sample]) -> dict[str, list[tuple[float, float]]]:
    """Points of each process: seconds and MB."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in samples:
        found.setdefault(one.process, []).append((one.at_s, one.anonymous / MB))
    return found


def slope_of(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between any two points (Theil and Sen): a few far-off ones do not bend it."""
    few = points[:: 1 + len(points) // PAIRS_OF]
    slopes = []
    for (before_s, before), (after_s, after) in combinations(few, 2):
        with suppress(ZeroDivisionError):
            slopes.append((after - before) / (after_s - before_s))
    return statistics.median(slopes)


def table(rows: Sequence[Growth], settled_s: float = SETTLED_S) -> str:
    minutes = f"after {settled_s / 60:g} min"
    lines = [f"| process | start, MB | {minutes} | end | most | MB per 10 min from then on |", "| --- " * 6 + "|"]
    for one in rows:
        slope = "" if one.per_10_minutes is None else f"**{one.per_10_minutes:+.2f}**"
        lines.append(
            f"| {one.process} | {one.start:.0f} | {one.settled:.1f} | {one.end:.1f} | {one.most:.1f} | {slope} |"
        )
    return "\n".join(lines)


def draw(path: Path, samples: Sequence[Sample], title: str) -> None:
    with drawing(path, title=title, x="minutes", y="anonymous memory, MB") as axes:
        for name, points in by_process(samples).items():
            axes.plot([at_s / 60 for at_s, _ in points], [size for _, size in points], label=name)
        axes.set_ylim(bottom=0)
