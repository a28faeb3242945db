"""All findings of a watch, as they are printed in JSON."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest

from msgspec import Struct

from lab.shadow.cases import Speeds, at_pace, cases_of, speeds_of
from lab.shadow.engines import Counted, changes, summed
from lab.shadow.record import AtOnceSums, Miss, Record, at_once_sums
from lab.shadow.twin import Side, fitted_pace, twin_of
from lab.shadow.watch import Seen

MOST_MISSES = 10
MOST_UNNAMED = 8


class Run(Struct, frozen=True):
    """A run of the twin."""

    hit_share: float
    prefill_s: float
    ttft_mean_s: float


class Measured(Struct, frozen=True):
    """How requests were really served; None: nobody says so."""

    hit_share: float | None  # by the replicas' counters
    ttft_mean_s: float | None  # of the file's lines; without any, by the replicas' counters
    reported_hit_share: float | None  # of the file's lines
    by_replica: dict[str, float]  # hit shares


class Sure(Struct, frozen=True, kw_only=True):
    exact_trees: int
    doubts: dict[str, str]  # replica -> why its tree may differ from its cache
    exact_prompts: int
    approximate: dict[str, int]  # prompts by reason
    replica_known: dict[str, int]  # requests by how it is known where they went
    left_out: int  # of the twin
    refused: int  # in the twin
    dropped: int  # the oldest requests, for which there was no room
    late: int  # seen too late to know the caches of their arrival
    assumed: tuple[str, ...]
    unnamed: dict[str, int] = {}  # requests by the replica that a file names, and that is none of those here


class Findings(Struct, frozen=True, kw_only=True):
    seconds: float
    policy: str
    requests: int
    skipped: dict[str, int]
    simulated_requests: int
    prompt_tokens: int  # of those
    served: Run
    warmroute: Run  # the mean of its runs, which differ by draws among equals
    runs: list[Run]
    saved_prefill_s: float
    measured: Measured
    at_once: AtOnceSums
    misses: list[Miss]
    misses_of_twin: bool  # none was seen: they are of the twin
    sure: Sure
    speeds: Speeds


def findings(
    seen: Seen,
    policy: str,
    *,
    capacity_tokens: int | None = None,
    prefill_tokens_per_s: float | None = None,
    on_request: Callable[[], None] = lambda: None,
) -> Findings:
    records = list(seen.placing.records)
    by_server = changes(seen.first, seen.last)
    counted = summed(by_server.values())
    # The replicas' counters say nothing of the requests if most of these came before the watch.
    is_of_watch = 2 * sum(one.ts < seen.began_ts for one in records) <= len(records)
    measured = _measured(records, by_server if is_of_watch else {})
    speeds = speeds_of(
        seen.replicas, counted, capacity_tokens=capacity_tokens, prefill_tokens_per_s=prefill_tokens_per_s
    )
    cases, left_out = cases_of(records, seen.replicas, speeds)
    if cases and measured.ttft_mean_s is not None and prefill_tokens_per_s is None:
        speeds = at_pace(speeds, fitted_pace(cases, speeds.pace_tokens_per_s, measured.ttft_mean_s, on_request))
        cases, _ = cases_of(records, seen.replicas, speeds)
    twin = twin_of(cases, policy, on_request)
    tokens = twin.served.tokens
    served, ours = _run(twin.served, tokens, speeds), _run(twin.mean, tokens, speeds)
    misses = [miss for record in records if (miss := record.miss) is not None]
    return Findings(
        seconds=seen.seconds,
        policy=policy,
        requests=seen.placing.seen,
        skipped=dict(seen.skipped),
        simulated_requests=twin.served.requests,
        prompt_tokens=tokens,
        served=served,
        warmroute=ours,
        runs=[_run(side, tokens, speeds) for side in twin.placed],
        saved_prefill_s=served.prefill_s - ours.prefill_s,
        measured=measured,
        at_once=at_once_sums(records),
        misses=nlargest(MOST_MISSES, misses or twin.misses, key=lambda miss: miss.tokens),
        misses_of_twin=not misses,
        sure=_sure(seen, records, left_out, twin.refused, speeds),
        speeds=speeds,
    )


def _measured(records: Sequence[Record], by_server: Mapping[str, Counted]) -> Measured:
    counted = summed(by_server.values())
    cached = [(one.cached_tokens, one.tokens) for one in records if one.cached_tokens is not None]
    ttfts_s = [one.ttft_s for one in records if one.ttft_s is not None]
    return Measured(
        hit_share=_share(counted.hit_tokens, counted.query_tokens),
        ttft_mean_s=_share(sum(ttfts_s), len(ttfts_s)) or counted.first_token_s.value,
        reported_hit_share=_share(sum(tokens for tokens, _ in cached), sum(tokens for _, tokens in cached)),
        by_replica={name: one.hit_tokens / one.query_tokens for name, one in by_server.items() if one.query_tokens},
    )


def _run(side: Side, tokens: int, speeds: Speeds) -> Run:
    """`tokens`: of all prompts; the side of several runs has each of them several times."""
    prefill_s = (1 - side.hit_share) * tokens / speeds.prefill_tokens_per_s
    return Run(side.hit_share, prefill_s, side.ttft_mean_s)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _sure(seen: Seen, records: Sequence[Record], left_out: int, refused: int, speeds: Speeds) -> Sure:
    doubts = {one.name: one.doubt for one in seen.replicas if one.doubt is not None}
    return Sure(
        exact_trees=len(seen.replicas) - len(doubts),
        doubts=doubts,
        exact_prompts=sum(record.exact for record in records),
        approximate=dict(seen.placing.approximate),
        replica_known=dict(Counter(record.source or "unknown" for record in records)),
        left_out=left_out,
        refused=refused,
        dropped=seen.placing.records.dropped,
        late=seen.placing.late,
        assumed=speeds.assumed,
        unnamed=dict(seen.placing.unnamed.most_common(MOST_UNNAMED)),
    )
