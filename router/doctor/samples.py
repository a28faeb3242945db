"""What a /metrics said at one moment: values by name and labels."""

from collections import defaultdict
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class BadMetrics(Exception):
    """It is not Prometheus' text format."""


class _Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Samples:
    """Of several names for the same thing the first that is there counts: engines have renamed some."""

    def __init__(self, text: str = "") -> None:
        self._samples: dict[str, list[_Sample]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.value == sample.value:  # what is nan says nothing
                        self._samples[sample.name].append(_Sample(sample.labels, sample.value))
        except (ValueError, KeyError, IndexError) as error:  # whatever the parser trips over
            raise BadMetrics(f"it answers no metrics: {error}") from error

    def total(self, *names: str, **labels: str) -> float | None:
        """Added up over all that have these labels; None: there are none."""
        found = self._found(names, labels)
        return sum(found) if found else None

    def most(self, *names: str, **labels: str) -> float | None:
        return max(self._found(names, labels), default=None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Added up for each value of a label."""
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
