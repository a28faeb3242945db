"""Changes between polls: rates over the last seconds, and counters that rose. Time is an argument."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import astuple

from router.doctor.samples import Samples
from router.responses import ReplicaStatus

WINDOW_S = 15.0
TREND = 20  # polls that are drawn
RISEN_S = 60.0  # how long a counter that rose stays marked
COUNTERS = ("gaps", "lost_batches", "repairs", "restarts", "digest_mismatches", "reconnects")

Counts = tuple[float, ...]


class Totals(Struct, frozen=True):
    """Sums over all replicas and models from GET /metrics."""

    open_requests: float = 0
    queue_length: float = 0
    draining: float = 0
    retries_total: float = 0
    resumes_total: float = 0
    refused_total: float = 0
    first_tokens: dict[str, tuple[float, float]] = {}  # by labels: count and total seconds


PREFIX = "warmroute_router:"
FIRST_TOKENS = f"{PREFIX}time_to_first_token_seconds_"
SUMS = Totals.__struct_fields__[:-1]
WANTED = {*(f"{PREFIX}{name}" for name in SUMS), f"{FIRST_TOKENS}count", f"{FIRST_TOKENS}sum"}


def totals_of(metrics: str) -> Totals | None:
    """Parse a router's /metrics; None if it is not one. Raises BadMetrics."""
    samples = Samples(metrics, WANTED)
    if samples.total(f"{PREFIX}open_requests") is None:
        return None
    counts, seconds = samples.each(f"{FIRST_TOKENS}count"), samples.each(f"{FIRST_TOKENS}sum")
    first_tokens = {labels: (count, seconds.get(labels, 0.0)) for labels, count in counts.items()}
    return Totals(**{name: samples.total(f"{PREFIX}{name}") or 0.0 for name in SUMS}, first_tokens=first_tokens)


class Rates(NamedTuple):
    requests_per_s: float
    prompt_tokens_per_s: float
    prefill_tokens_per_s: float  # prompt tokens predicted not to be cached
    batches_per_s: float
    generated_tokens_per_s: float
    streamed_tokens_per_s: float
    streaming: float  # answers that were being generated, on average

    @property
    def token_s(self) -> float | None:
        """The mean time of an answer's token; None: there were none."""
        return self.streaming / self.streamed_tokens_per_s if self.streamed_tokens_per_s else None

    @property
    def hit(self) -> float | None:
        """The share of prompt tokens predicted to be cached; None: there were none."""
        return 1 - self.prefill_tokens_per_s / self.prompt_tokens_per_s if self.prompt_tokens_per_s else None


class Window:
    """Counters of the last seconds by name; a counter that fell was reset and starts anew."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, dict[str, Counts]]] = deque()

    def add(self, counts: Mapping[str, Counts], now_s: float) -> None:
        for name, now in counts.items():
            # The last poll may lack it: a router that has just started knows no replicas yet.
            before = next((sample[name] for _, sample in reversed(self._samples) if name in sample), now)
            if any(new < old for new, old in zip(now, before, strict=True)):
                for _, sample in self._samples:
                    sample.pop(name, None)
        self._samples.append((now_s, dict(counts)))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()

    @property
    def names(self) -> Iterable[str]:
        """The names in the last sample."""
        return self._samples[-1][1] if self._samples else ()

    def rise(self, name: str) -> tuple[Counts, float] | None:
        """The increase and its seconds; None before the second sample."""
        if name not in self.names:
            return None
        first_s, first = next((at_s, sample) for at_s, sample in self._samples if name in sample)
        last_s, last = self._samples[-1]
        if last_s <= first_s:
            return None
        return tuple(new - old for new, old in zip(last[name], first[name], strict=True)), last_s - first_s


class History:
    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.trend: deque[Rates] = deque(maxlen=TREND)  # of all replicas, one for each poll
        self._served, self._batches, self._first_tokens = Window(window_s), Window(window_s), Window(window_s)
        self._counters: dict[str, Counts] = {}
        self._rose_s: dict[str, dict[str, float]] = {}

    def add(self, replicas: Iterable[ReplicaStatus], now_s: float) -> None:
        known = list(replicas)
        streams = {one.name: one.events for one in known if one.events is not None}
        self._served.add({one.name: astuple(one.served) for one in known}, now_s)
        self._batches.add({name: (stream.seq,) for name, stream in streams.items()}, now_s)
        if (total := self.total()) is not None:
            self.trend.append(total)
        before, rose_before, self._rose_s = self._counters, self._rose_s, {}
        self._counters = {name: tuple(getattr(one, field) for field in COUNTERS) for name, one in streams.items()}
        for name, values in self._counters.items():
            compared = zip(COUNTERS, values, before.get(name, values), strict=True)
            rose = {field: at_s for field, at_s in rose_before.get(name, {}).items() if at_s > now_s - RISEN_S}
            rose |= {field: now_s for field, value, old in compared if value > old}
            if rose:
                self._rose_s[name] = rose

    def add_totals(self, totals: Totals, now_s: float) -> None:
        self._first_tokens.add(totals.first_tokens, now_s)

    def mean_ttft_s(self) -> float | None:
        """The mean over the window; None: no response started."""
        rises = [found[0] for name in self._first_tokens.names if (found := self._first_tokens.rise(name)) is not None]
        begun = sum(count for count, _ in rises)
        return sum(seconds for _, seconds in rises) / begun if begun else None

    def risen(self, replica: str) -> frozenset[str]:
        """The COUNTERS that rose in the last minute."""
        return frozenset(self._rose_s.get(replica, ()))

    def any_risen(self) -> frozenset[str]:
        return frozenset(name for rose in self._rose_s.values() for name in rose)

    def rates(self, replica: str) -> Rates | None:
        """Rates of one replica; None before its second sample."""
        if (served := self._served.rise(replica)) is None:
            return None
        (requests, prompt, matched, *generated), over_s = served
        batches, batches_s = self._batches.rise(replica) or ((0.0,), 1.0)
        first = requests / over_s, prompt / over_s, max(0.0, prompt - matched) / over_s, batches[0] / batches_s
        return Rates(*first, *(value / over_s for value in generated))

    def total(self) -> Rates | None:
        found = [rates for name in self._served.names if (rates := self.rates(name)) is not None]
        return Rates(*map(sum, zip(*found, strict=True))) if found else None
