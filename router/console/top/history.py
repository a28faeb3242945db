"""Changes between polls: rates over the last seconds, and counters that rose. Time is an argument."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import astuple

from router.responses import ReplicaStatus

WINDOW_S = 15.0
OF_STREAM = ("gaps", "lost_batches", "repairs", "restarts", "digest_mismatches", "reconnects")

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


class History:
    """Counters of the last seconds by replica; those of one whose counters fell were reset, and start anew."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._looks: deque[tuple[float, dict[str, Counts]]] = deque()

    def add(self, replicas: Iterable[ReplicaStatus], now_s: float) -> None:
        counts: dict[str, Counts] = {}
        for one in replicas:
            events = [0] * (1 + len(OF_STREAM))
            if one.events is not None:
                events = [getattr(one.events, name) for name in ("seq", *OF_STREAM)]
            counts[one.name] = now = events[0], *astuple(one.served), *events[1:]
            # The last poll may lack it: a router that has just started knows no replicas yet.
            before = next((look[one.name] for _, look in reversed(self._looks) if one.name in look), now)
            is_reset = any(new < old for new, old in zip(now[1:], before[1:], strict=True))
            for _, look in self._looks if is_reset or now[0] < before[0] else ():
                known = look.pop(one.name, None)
                if known is not None and not is_reset:  # only its stream has begun anew: batches count from here on
                    look[one.name] = now[0], *known[1:]
        self._looks.append((now_s, counts))
        while len(self._looks) > 2 and self._looks[1][0] <= now_s - self._window_s:
            self._looks.popleft()

    def _rise(self, replica: str) -> tuple[Counts, float] | None:
        """The increase and its seconds; None before the second look."""
        looks = [(at_s, look[replica]) for at_s, look in self._looks if replica in look]
        if not looks or looks[-1][0] <= looks[0][0] or replica not in self._looks[-1][1]:
            return None
        (first_s, first), (last_s, last) = looks[0], looks[-1]
        return tuple(new - old for new, old in zip(last, first, strict=True)), last_s - first_s

    @property
    def _names(self) -> Iterable[str]:
        return self._looks[-1][1] if self._looks else ()

    def risen(self, replica: str) -> frozenset[str]:
        """The counters of its event stream that rose lately."""
        counts, _ = self._rise(replica) or ((), 0.0)
        return frozenset(name for name, more in zip(OF_STREAM, counts[-len(OF_STREAM) :], strict=False) if more)

    def any_risen(self) -> frozenset[str]:
        return frozenset().union(*map(self.risen, self._names))

    def rates(self, replica: str) -> Rates | None:
        if (rise := self._rise(replica)) is None:
            return None
        batches, requests, prompt, matched, *generated = (more / rise[1] for more in rise[0][: -len(OF_STREAM)])
        return Rates(requests, prompt, max(0.0, prompt - matched), batches, *generated)

    def total(self) -> Rates | None:
        found = [rates for name in self._names if (rates := self.rates(name)) is not None]
        return Rates(*map(sum, zip(*found, strict=True))) if found else None
