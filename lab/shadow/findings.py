"""All findings of a watch, as they are printed in JSON, and as text."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from events.tool.words import printable
from lab.shadow.placing import AtOnceSums, Record, at_once_sums
from lab.shadow.replicas import Counted, changes, summed
from lab.shadow.twin import Side, Speeds, at_pace, cases_of, fitted_pace, speeds_of, twin_of
from lab.shadow.watch import Seen
from lab.writing import UNKNOWN, aligned
from router.console.formatting import duration

MAX_UNNAMED = 8


class Run(Struct, frozen=True):
    hit_share: float
    prefill_s: float
    ttft_mean_s: float


class Measured(Struct, frozen=True):
    """How requests were really served; None: nobody says so."""

    hit_share: float | None  # the share by the replicas' counters
    ttft_mean_s: float | None  # the mean of the file's lines; without any, that of the replicas' counters
    reported_hit_share: float | None  # the share in the file's lines
    by_replica: dict[str, float]  # hit shares


class Sure(Struct, frozen=True, kw_only=True):
    exact_trees: int
    doubts: dict[str, str]  # replica -> why its tree may differ from its cache
    exact_prompts: int
    approximate: dict[str, int]  # prompts by reason
    replica_known: dict[str, int]  # requests by how it is known where they went
    left_out: int  # requests that the twin leaves out
    refused: int  # requests that the twin refuses
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
    prompt_tokens: int  # the prompt tokens of those
    served: Run
    warmroute: Run  # the mean of its runs, which differ by draws among equals
    runs: list[Run]
    saved_prefill_s: float
    measured: Measured
    at_once: AtOnceSums
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
    doubts = {one.name: one.doubt for one in seen.replicas if one.doubt is not None}
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
        sure=Sure(
            exact_trees=len(seen.replicas) - len(doubts),
            doubts=doubts,
            exact_prompts=sum(record.exact for record in records),
            approximate=dict(seen.placing.approximate),
            replica_known=dict(Counter(record.source or "unknown" for record in records)),
            left_out=left_out,
            refused=twin.refused,
            dropped=seen.placing.records.dropped,
            late=seen.placing.late,
            assumed=speeds.assumed,
            unnamed=dict(seen.placing.unnamed.most_common(MAX_UNNAMED)),
        ),
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


# ---- as text

SOURCES = {
    "told": "told",
    "stored": "by the events",
    "held": "cached before at one replica",
    "one of several": "cached before at several replicas",
    "unknown": "unknown",
}


def lines(found: Findings) -> Iterator[str]:
    skipped = ", ".join(f"{count:,} {why}" for why, count in found.skipped.items())
    skipped = f"; {sum(found.skipped.values()):,} skipped ({skipped})" if skipped else ""
    yield f"{found.requests:,} requests in {duration(found.seconds)}{skipped}"
    if not found.simulated_requests:
        yield "nothing can be compared: no request could be placed, or nobody knows where they went"
        yield from _unnamed(found.sure)
        return
    served, ours = found.served, found.warmroute
    yield f"the twin: {found.simulated_requests:,} requests, {found.prompt_tokens:,} prompt tokens"
    yield ""
    runs = {"as it was served": served, f"warmroute ({found.policy})": ours}
    gains = (f"{100 * (ours.hit_share - served.hit_share):+.1f} points", _change(served.prefill_s, ours.prefill_s))
    yield from aligned(
        [
            ("", "hits", "prefill", "mean TTFT"),
            *(
                (name, f"{run.hit_share:.1%}", duration(run.prefill_s), duration(run.ttft_mean_s))
                for name, run in runs.items()
            ),
            ("gain", *gains, _change(served.ttft_mean_s, ours.ttft_mean_s)),
        ]
    )
    if found.runs:
        times_s = [run.ttft_mean_s for run in found.runs]
        yield f"{len(times_s)} runs of warmroute: mean TTFT {duration(min(times_s))} to {duration(max(times_s))}"
    yield f"prefill saved: {duration(found.saved_prefill_s)} of the replicas' time"
    yield ""
    yield from _checks(found)
    yield from _sure(found.sure, found.speeds)


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}" if before else UNKNOWN


def _checks(found: Findings) -> Iterator[str]:
    """Say what holds the twin against what was measured."""
    measured, once = found.measured, found.at_once
    yield "measured, as it was served"
    if measured.hit_share is not None:
        yield f"  hits, by the replicas' counters: {measured.hit_share:.1%}"
    if measured.reported_hit_share is not None:
        yield f"  hits, as the file says: {measured.reported_hit_share:.1%}"
    if measured.ttft_mean_s is not None:
        yield f"  mean TTFT: {duration(measured.ttft_mean_s)}"
    if once.tokens:
        served, chosen = once.served_hit / once.tokens, once.chosen_hit / once.tokens
        yield f"  cached where it went, {once.requests:,} requests: {served:.1%}"
        yield f"  cached where warmroute would have sent each, with the caches as they were: {chosen:.1%}"
    for name, share in measured.by_replica.items():
        yield f"  {name}: {share:.1%} hits"


def _unnamed(sure: Sure) -> Iterator[str]:
    for name, count in sure.unnamed.items():
        yield (
            f"    {count:,} at {printable(name)!r}, which is the name of no replica here: give "
            f"--replica url=URL,name={printable(name)}"
        )


def _sure(sure: Sure, speeds: Speeds) -> Iterator[str]:
    yield ""
    yield "how sure"
    yield f"  trees: {sure.exact_trees} of {sure.exact_trees + len(sure.doubts)} exact"
    for name, doubt in sure.doubts.items():
        yield f"    {name}: {doubt}"
    yield f"  prompts: {sure.exact_prompts:,} exact, {sum(sure.approximate.values()):,} approximate"
    for why, count in sure.approximate.items():
        yield f"    {count:,}: {printable(why)}"
    known = ", ".join(f"{count:,} {SOURCES[source]}" for source, count in sure.replica_known.items())
    yield f"  where requests went: {known}"
    yield from _unnamed(sure)
    yield f"  cache of each replica: {speeds.capacity_tokens:,} tokens"
    yield f"  prefill: {speeds.prefill_tokens_per_s:,.0f} tokens/s, in the twin {speeds.pace_tokens_per_s:,.0f}"
    for assumption in sure.assumed:
        yield f"  assumed: {assumption}"
    for count, what in (
        (sure.late, "seen more than a second after they came: placed by the twin alone"),
        (
            sure.left_out,
            "left out of the twin: where they went is unknown, blocks of another size, or too long for the cache",
        ),
        (sure.refused, "waited for room in vain in the twin"),
        (sure.dropped, "the oldest, forgotten for newer ones"),
    ):
        if count:
            yield f"  {count:,} requests {what}"
