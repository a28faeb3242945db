"""What happened between the looks: rates over the last seconds, and which counters rose lately. Time is an argument."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from router.top.answers import Replica, Totals

WINDOW_S = 15.0
NEWS_S = 60.0  # for so long a counter that rose is shown as one
COUNTERS = ("gaps", "lost_batches", "repairs", "restarts", "digest_mismatches", "reconnects")


class Rates(NamedTuple):
    requests_per_s: float
    prompt_tokens_per_s: float
    prefill_tokens_per_s: float  # of the prompts what was predicted not to be cached
    batches_per_s: float
    hit: float | None  # part of the prompt tokens; None: there were none


class _Counts(NamedTuple):
    requests: int
    prompt_tokens: int
    matched_tokens: int
    batches: int


class _Sample(NamedTuple):
    at_s: float
    counts: dict[str, _Counts]  # by replica


class History:
    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()
        self._counters: dict[str, tuple[int, ...]] = {}
        self._rose_s: dict[str, dict[str, float]] = {}
        self._totals: deque[tuple[float, Totals]] = deque()

    def add(self, replicas: Iterable[Replica], now_s: float) -> None:
        known = list(replicas)
        sample = _Sample(now_s, {one.name: _counts(one) for one in known})
        if self._samples and _is_less(sample.counts, self._samples[-1].counts):
            self._samples.clear()  # another router process: it counts from 0
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - self._window_s:
            self._samples.popleft()
        self._note_rises(known, now_s)

    def add_totals(self, totals: Totals, now_s: float) -> None:
        if self._totals and _first_tokens(totals) < _first_tokens(self._totals[-1][1]):
            self._totals.clear()
        self._totals.append((now_s, totals))
        while len(self._totals) > 2 and self._totals[1][0] <= now_s - self._window_s:
            self._totals.popleft()

    def mean_ttft_s(self) -> float | None:
        """Of the last seconds; None: no answer began."""
        if len(self._totals) < 2:
            return None
        (_, then), (_, now) = self._totals[0], self._totals[-1]
        begun = _first_tokens(now) - _first_tokens(then)
        took_s = now.time_to_first_token_seconds_sum - then.time_to_first_token_seconds_sum
        return took_s / begun if begun else None

    def _note_rises(self, replicas: list[Replica], now_s: float) -> None:
        before, self._counters = self._counters, {}
        rose_before, self._rose_s = self._rose_s, {}
        for one in replicas:
            if one.events is None:
                continue
            values = tuple(getattr(one.events, name) for name in COUNTERS)
            self._counters[one.name] = values
            rose = {name: at_s for name, at_s in rose_before.get(one.name, {}).items() if at_s > now_s - NEWS_S}
            for name, value, old in zip(COUNTERS, values, before.get(one.name, values), strict=True):
                if value > old:
                    rose[name] = now_s
            if rose:
                self._rose_s[one.name] = rose

    def risen(self, replica: str) -> frozenset[str]:
        """Of COUNTERS, those that rose in the last minute."""
        return frozenset(self._rose_s.get(replica, ()))

    def any_risen(self) -> frozenset[str]:
        return frozenset(name for rose in self._rose_s.values() for name in rose)

    def rates(self, replica: str) -> Rates | None:
        """None: it has been looked at only once."""
        if len(self._samples) < 2 or (now := self._samples[-1].counts.get(replica)) is None:
            return None
        first = next(sample for sample in self._samples if replica in sample.counts)
        return _rates([(first.counts[replica], now)], self._samples[-1].at_s - first.at_s)

    def total(self) -> Rates | None:
        if len(self._samples) < 2:
            return None
        first, last = self._samples[0], self._samples[-1]
        pairs = [(first.counts[name], now) for name, now in last.counts.items() if name in first.counts]
        return _rates(pairs, last.at_s - first.at_s)


def _counts(replica: Replica) -> _Counts:
    served = replica.served
    seq = -1 if replica.events is None else replica.events.seq
    return _Counts(served.requests, served.prompt_tokens, served.matched_tokens, seq)


def _first_tokens(totals: Totals) -> float:
    return totals.time_to_first_token_seconds_count


def _is_less(now: dict[str, _Counts], before: dict[str, _Counts]) -> bool:
    return any(name in before and counts.requests < before[name].requests for name, counts in now.items())


def _rates(pairs: list[tuple[_Counts, _Counts]], over_s: float) -> Rates | None:
    if over_s <= 0:
        return None
    requests = sum(now.requests - then.requests for then, now in pairs)
    prompt = sum(now.prompt_tokens - then.prompt_tokens for then, now in pairs)
    matched = sum(now.matched_tokens - then.matched_tokens for then, now in pairs)
    batches = sum(max(0, now.batches - then.batches) for then, now in pairs)  # one that restarted counts anew
    return Rates(
        requests_per_s=requests / over_s,
        prompt_tokens_per_s=prompt / over_s,
        prefill_tokens_per_s=(prompt - matched) / over_s,
        batches_per_s=batches / over_s,
        hit=matched / prompt if prompt else None,
    )
