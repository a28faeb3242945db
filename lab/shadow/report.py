"""The findings as text."""

from collections.abc import Iterator

from events.tool.words import printable
from lab.shadow.cases import Speeds
from lab.shadow.findings import Findings, Sure
from lab.writing import UNKNOWN, aligned
from router.console.formatting import duration

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
    if found.misses:
        yield ""
        yield "worst misses" + (", in the twin" if found.misses_of_twin else "")
    for miss in found.misses:
        yield (
            f"  {printable(miss.request_id)}: {miss.hit_tokens:,.0f} tokens cached at {miss.replica}, "
            f"{miss.other_hit_tokens:,.0f} at {miss.other}"
        )
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
