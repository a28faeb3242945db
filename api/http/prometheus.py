"""Writes Prometheus' text format (0.0.4), a tenth of the work that `prometheus_client` takes for it, and in parts."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
# vLLM's own bounds of a time to first token, so that dashboards show both side by side.
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip


class Histogram:
    """Counts between bounds, in a plain list: some are touched for every token."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Buckets as Prometheus expects them: cumulative, up to +Inf."""
        reached, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            reached += count
            buckets.append((bound, float(reached)))
        return buckets


def labels(**values: str) -> str:
    return ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in values.items())


def head(name: str, meaning: str, kind: str) -> str:
    whole = f"{name}_total" if kind == "counter" else name
    return f"# HELP {whole} {meaning}\n# TYPE {whole} {kind}\n"


def line(name: str, labels: str, value: float) -> str:
    number = float(value)
    text = repr(number) if math.isfinite(number) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(number, "NaN")
    return f"{name}{{{labels}}} {text}\n" if labels else f"{name} {text}\n"


def metric(kind: str, name: str, meaning: str, samples: Iterable[tuple[str, float]]) -> str:
    """Write a gauge or a counter with its samples: labels and values."""
    whole = f"{name}_total" if kind == "counter" else name
    return head(name, meaning, kind) + "".join(line(whole, labels, value) for labels, value in samples)


def histogram(name: str, labels: str, one: Histogram) -> str:
    """Write the lines of a histogram, without its head."""
    buckets, before = one.buckets(), f"{labels}," if labels else ""
    lines = [line(f"{name}_bucket", f'{before}le="{bound}"', count) for bound, count in buckets]
    return "".join(lines) + line(f"{name}_count", labels, buckets[-1][1]) + line(f"{name}_sum", labels, one.total)
