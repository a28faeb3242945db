"""Changes between polls: rates over the last seconds, and counters that rose. Time is an argument."""

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import astuple

from router.responses import FeedState, ReplicaStatus

WINDOW_S = 15.0
OF_STREAM = ("gaps", "lost_batches", "repairs", "restarts", "digest_mismatches", "reconnects")
_of_stream = attrgetter(*OF_STREAM, "seq")
_NO_STREAM = FeedState()


class Recent(NamedTuple):
    """Figures of the last seconds; None: the replica was looked at only once, or there was nothing to divide."""

    risen: frozenset[str] = frozenset()  # counters of event streams
    requests: float | None = None  # per second, as are the next four
    prompt_tokens: float | None = None
    prefill_tokens: float | None = None  # those among them that were predicted not to be cached
    generated_tokens: float | None = None
    batches: float | None = None
    hit: float | None = None  # the share of prompt tokens predicted to be cached
    token_s: float | None = None  # the mean time of an answer's token


NOTHING = Recent()
Rise = tuple[frozenset[str], list[float]]  # the counters that rose, and rates


def recent_of(rises: Sequence[Rise]) -> Recent:
    """All of these replicas together."""
    if not rises:
        return NOTHING
    batches, requests, prompt, matched, generated, streamed, streaming = map(
        sum, zip(*(one for _, one in rises), strict=True)
    )
    risen: frozenset[str] = frozenset().union(*(names for names, _ in rises))
    prefill = max(0.0, prompt - matched)
    hit, token_s = 1 - prefill / prompt if prompt else None, streaming / streamed if streamed else None
    return Recent(risen, requests, prompt, prefill, generated, batches, hit, token_s)


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

    def rise(self, replica: str) -> list[Rise]:
        """The growth at a replica; nothing before the second look."""
        last_s, last = self._looks[-1] if self._looks else (0.0, {})
        first_s, first = next((look for look in self._looks if replica in look[1]), (last_s, last))
        if replica not in last or first_s >= last_s:
            return []
        rose = [new - old for new, old in zip(last[replica][1], first[replica][1], strict=True)]
        risen = frozenset(name for name, more in zip(OF_STREAM, rose, strict=False) if more)
        return [(risen, [more / (last_s - first_s) for more in rose[len(OF_STREAM) :]])]

    def recent(self, *replicas: str) -> Recent:
        return recent_of([rise for name in replicas for rise in self.rise(name)])
