"""Counts and histograms of one (model, replica), as /metrics shows them: plain numbers, cheap to add to."""

from bisect import bisect_left

# vLLM's own bounds, so that dashboards show both side by side.
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
REQUEST_S = (
    0.005, 0.02, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
DECISION_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: cumulative, up to +Inf."""
        reached, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            reached += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound}", float(reached)))
        return buckets


class Tally:
    """What one replica has done for one model, as this router saw it."""

    __slots__ = (
        "blocks_predicted",
        "blocks_reported",
        "first_token_s",
        "matched_tokens",
        "prompt_tokens",
        "request_s",
        "retries",
        "statuses",
    )

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.request_s = Histogram(REQUEST_S)
        self.prompt_tokens = 0
        self.matched_tokens = 0  # predicted
        self.blocks_predicted = 0  # of requests whose report is known
        self.blocks_reported = 0
        self.retries = 0
