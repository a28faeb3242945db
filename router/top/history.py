"""Changes between polls: rates over the last seconds, and counters that rose. Time is an argument."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from router.responses import ReplicaStatus
from router.top.responses import Totals

WINDOW_S = 15.0
TREND = 20  # polls that are drawn
RISEN_S = 60.0  # how long a counter that rose stays marked
COUNTERS = ("gaps", "lost_batches", "repairs", "restarts", "digest_mismatches", "reconnects")

Counts = tuple[float, ...]


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
                self._forget(name)
        self._samples.append((now_s, dict(counts)))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()

    def _forget(self, name: str) -> None:
        for _, sample in self._samples:
            sample.pop(name, None)

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
        self._served = Window(window_s)
        self._batches = Window(window_s)
        self._first_tokens = Window(window_s)
        self._counters: dict[str, tuple[int, ...]] = {}
        self.trend: deque[Rates] = deque(maxlen=TREND)  # of all replicas, one for each poll
        self._rose_s: dict[str, dict[str, float]] = {}

    def add(self, replicas: Iterable[ReplicaStatus], now_s: float) -> None:
        known = list(replicas)
        self._served.add({one.name: _served(one) for one in known}, now_s)
        self._batches.add({one.name: (one.events.seq,) for one in known if one.events is not None}, now_s)
        self._note_rises(known, now_s)
        if (total := self.total()) is not None:
            self.trend.append(total)

    def add_totals(self, totals: Totals, now_s: float) -> None:
        self._first_tokens.add(totals.first_tokens, now_s)

    def mean_ttft_s(self) -> float | None:
        """The mean over the window; None: no response started."""
        rises = [found[0] for name in self._first_tokens.names if (found := self._first_tokens.rise(name)) is not None]
        begun = sum(count for count, _ in rises)
        return sum(seconds for _, seconds in rises) / begun if begun else None

    def _note_rises(self, replicas: list[ReplicaStatus], now_s: float) -> None:
        before, self._counters = self._counters, {}
        rose_before, self._rose_s = self._rose_s, {}
        for one in replicas:
            if one.events is None:
                continue
            values = tuple(getattr(one.events, name) for name in COUNTERS)
            self._counters[one.name] = values
            rose = {name: at_s for name, at_s in rose_before.get(one.name, {}).items() if at_s > now_s - RISEN_S}
            for name, value, old in zip(COUNTERS, values, before.get(one.name, values), strict=True):
                if value > old:
                    rose[name] = now_s
            if rose:
                self._rose_s[one.name] = rose

    def risen(self, replica: str) -> frozenset[str]:
        """The COUNTERS that rose in the last minute."""
        return frozenset(self._rose_s.get(replica, ()))

    def any_risen(self) -> frozenset[str]:
        return frozenset(name for rose in self._rose_s.values() for name in rose)

    def rates(self, replica: str) -> Rates | None:
        """Rates of one replica; None before its second sample."""
        if (served := self._served.rise(replica)) is None:
            return None
        (requests, prompt, matched, generated, streamed, streaming_s), over_s = served
        batches = self._batches.rise(replica)
        return Rates(
            requests_per_s=requests / over_s,
            prompt_tokens_per_s=prompt / over_s,
            prefill_tokens_per_s=max(0.0, prompt - matched) / over_s,
            batches_per_s=batches[0][0] / batches[1] if batches is not None else 0.0,
            generated_tokens_per_s=generated / over_s,
            streamed_tokens_per_s=streamed / over_s,
            streaming=streaming_s / over_s,
        )

    def total(self) -> Rates | None:
        found = [rates for name in self._served.names if (rates := self.rates(name)) is not None]
        return Rates(*map(sum, zip(*found, strict=True))) if found else None


def _served(replica: ReplicaStatus) -> Counts:
    served = replica.served
    prompts = (served.requests, served.prompt_tokens, served.matched_tokens)
    return *prompts, served.generated_tokens, served.streamed_tokens, served.streaming_s
