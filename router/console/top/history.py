"""Changes between polls: rates over the last seconds, and counters that rose. Time is an argument."""

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import astuple

from router.responses import FeedState, ReplicaStatus

WINDOW_S = 15.0
OF_STREAM = ("gaps", "lost_batches", "repairs", "restarts", "digest_mismatches", "reconnects")
_of_stream = attrgetter(*OF_STREAM, "seq")
_NO_STREAM = FeedState()


class Recent(NamedTuple):
    """What has happened lately, per second; None: it was looked at only once."""

    risen: frozenset[str] = frozenset()  # counters of event streams
    requests: float | None = None
    prompt_tokens: float | None = None
    matched_tokens: float | None = None  # of these, predicted to be cached
    generated_tokens: float | None = None
    streamed_tokens: float | None = None
    streaming: float | None = None  # answers that were being generated, on average
    batches: float | None = None

    @property
    def token_s(self) -> float | None:
        """The mean time of an answer's token; None: there were none."""
        return (self.streaming or 0.0) / self.streamed_tokens if self.streamed_tokens else None

    @property
    def prefill_tokens(self) -> float | None:
        """Prompt tokens predicted not to be cached."""
        return None if self.prompt_tokens is None else max(0.0, self.prompt_tokens - (self.matched_tokens or 0.0))

    @property
    def hit(self) -> float | None:
        """The share of prompt tokens predicted to be cached; None: there were none."""
        return 1 - (self.prefill_tokens or 0.0) / self.prompt_tokens if self.prompt_tokens else None


NOTHING = Recent()


class History:
    """Sums of what the counters of each replica have grown by; one that falls was reset, and has grown by nothing."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._looks: deque[tuple[float, dict[str, tuple[tuple[float, ...], list[float]]]]] = deque()

    def add(self, replicas: Iterable[ReplicaStatus], now_s: float) -> None:
        look = {}
        for one in replicas:
            counts = (*_of_stream(one.events or _NO_STREAM), *astuple(one.served))
            # The last poll may lack it: a router that has just started knows no replicas yet.
            known = next((seen[one.name] for _, seen in reversed(self._looks) if one.name in seen), None)
            before, grown = known or (counts, [0.0] * len(counts))
            more = [total + max(0, new - old) for total, new, old in zip(grown, counts, before, strict=True)]
            look[one.name] = counts, more
        self._looks.append((now_s, look))
        while len(self._looks) > 2 and self._looks[1][0] <= now_s - self._window_s:
            self._looks.popleft()

    def recent(self, replica: str) -> Recent:
        last_s, last = self._looks[-1] if self._looks else (0.0, {})
        first_s, first = next((look for look in self._looks if replica in look[1]), (last_s, last))
        if replica not in last or first_s >= last_s:
            return NOTHING
        rose = [new - old for new, old in zip(last[replica][1], first[replica][1], strict=True)]
        batches, *served = (more / (last_s - first_s) for more in rose[len(OF_STREAM) :])
        risen = frozenset(name for name, more in zip(OF_STREAM, rose, strict=False) if more)
        return Recent._make([risen, *served, batches])


def total(recents: Iterable[Recent]) -> Recent:
    """All replicas together."""
    known = [one for one in recents if one.requests is not None]
    if not known:
        return NOTHING
    risen: frozenset[str] = frozenset().union(*(one.risen for one in known))
    return Recent._make([risen, *map(sum, zip(*(one[1:] for one in known), strict=True))])
