"""Reads a /metrics text in Prometheus' format, in a time that depends on its length, whoever wrote it."""

import re
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from engines import METRICS

_KNOWN_TO_ALL = re.compile(r"warmroute_router:(?:index|event|replica)_(?!in_flight)")
_SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*+)\s*(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*+")*+)\})?+\s*(\S++)(?:\s.*)?')
_LABEL = re.compile(r'([a-zA-Z_]\w*+)\s*=\s*"((?:[^"\\]|\\.)*+)"')
_ESCAPE = re.compile(r"\\(.)")


class BadMetrics(ValueError):
    """The text is not in Prometheus' format."""


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Samples:
    """Values by name and labels. Of several names, the first one present counts: engines renamed some metrics."""

    def __init__(self, text: str = "", names: Collection[str] | None = None) -> None:
        """`names`: those that are wanted; a text of 60,000 lines has some hundred of them."""
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        for line in text.split("\n"):
            if names is not None and line.partition("{")[0].partition(" ")[0] not in names:
                continue
            if line.startswith("#") or not line.strip():
                continue
            found = _SAMPLE.fullmatch(line)
            try:
                if found is None:
                    raise ValueError("it is no sample")
                name, labels, value = found[1], found[2] or "", float(found[3])
            except ValueError as error:
                raise BadMetrics(f"its metrics cannot be parsed: {line[:80]!r}: {error}") from error
            if value == value:  # not NaN
                told = {
                    label: _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], said)
                    for label, said in _LABEL.findall(labels)
                }
                self._samples[name].append(Sample(told, value))

    def of_rank(self, rank: int) -> "Samples":
        """The samples of one data-parallel rank, and those that belong to none."""
        kept, wanted = Samples(), str(rank)
        labels = METRICS.rank_labels[::-1]  # SGLang's samples may have an `engine`, too, which is no rank
        for name, samples in self._samples.items():
            ranks = (next((one.labels[label] for label in labels if label in one.labels), wanted) for one in samples)
            kept._samples[name] = [one for one, own in zip(samples, ranks, strict=True) if own == wanted]
        return kept

    def of_all_workers(self) -> "Samples":
        """The samples of a router as if it had one worker.

        Each counts its own requests, which are added up; what all know of a replica, they know from the same events.
        """
        kept = Samples()
        for name, samples in self._samples.items():
            values: dict[frozenset[tuple[str, str]], list[Sample]] = defaultdict(list)
            for one in samples:
                labels = {label: value for label, value in one.labels.items() if label != "worker"}
                values[frozenset(labels.items())].append(one._replace(labels=labels))
            merge = max if _KNOWN_TO_ALL.match(name) else sum
            kept._samples[name] = [
                same[0]._replace(value=float(merge(one.value for one in same))) for same in values.values()
            ]
        return kept

    def total(self, *names: str, **labels: str) -> float | None:
        """The sum of the samples with these labels; None: there are none."""
        found = self._found(names, labels)
        return sum(found) if found else None

    def most(self, *names: str, **labels: str) -> float | None:
        return max(self._found(names, labels), default=None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums by the values of a label."""
        sums: dict[str, float] = defaultdict(float)
        for sample in self._samples.get(name, ()):
            sums[sample.labels.get(label, "")] += sample.value
        return dict(sums)

    def label(self, name: str, label: str) -> str | None:
        return next((one.labels[label] for one in self._samples.get(name, ()) if label in one.labels), None)

    def _found(self, names: tuple[str, ...], labels: dict[str, str]) -> list[float]:
        for name in names:
            found = [one.value for one in self._samples.get(name, ()) if labels.items() <= one.labels.items()]
            if found:
                return found
        return []
