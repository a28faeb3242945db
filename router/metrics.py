"""The router's /metrics; docs/metrics.md has the table, and a test compares the two.

A metric is a row in one of the tables below. Nothing is counted here: the numbers are kept where they arise, and read
on request. Nothing is global: a process can have several routers. The text is written here rather than by
prometheus_client, which takes ten times as long and never pauses: a thousand replicas make 60,000 lines.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from router.core import Router
from router.members.feeds import FeedState
from router.members.members import Member, Members
from router.members.tally import Histogram, Tally
from router.status import is_salted

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PREFIX = "warmroute_router:"
SLICE_S = 0.002  # of work, before requests have their turn


class Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def meaning(self) -> str: ...


class Family(NamedTuple):
    """A metric with a writing function of its own."""

    name: str
    meaning: str


class OfMember(NamedTuple):
    """A number of one replica."""

    name: str
    meaning: str
    value: Callable[[Member], float]


class OfFeed(NamedTuple):
    """A number of one replica's event stream."""

    name: str
    meaning: str
    value: Callable[[FeedState], float]


class OfTally(NamedTuple):
    """A number of one model on one replica."""

    name: str
    meaning: str
    value: Callable[[Tally], float]


class OfRouter(NamedTuple):
    name: str
    meaning: str
    value: Callable[[Router], float]


MEMBER_GAUGES = (
    OfMember("replica_up", "1 if the replica takes requests.", lambda m: m.candidate.unavailable is None),
    OfMember("replica_in_flight", "Requests of this router that it is answering.", lambda m: m.candidate.in_flight),
    OfMember("replica_running", "Requests that it is answering, as it reports.", lambda m: m.candidate.running),
    OfMember("replica_waiting", "Requests that wait in it, as it reports.", lambda m: m.candidate.waiting),
    OfMember("replica_queued_tokens", "Prompt tokens ahead of a new request.", lambda m: m.candidate.queued_tokens),
    OfMember(
        "replica_prefill_tokens_per_second",
        "Its speed of prefill; 0 while it is not known.",
        lambda m: m.candidate.prefill_tokens_per_s,
    ),
    OfMember("replica_salted", "1 if its engine is known to keep caches of different salts apart.", is_salted),
    OfMember("replica_trust", "What its claims of cached tokens count for; 1 while they are true.", lambda m: m.trust),
    OfMember(
        "index_accuracy",
        "Fraction of its last 1,000 answers whose cached blocks were predicted to the block.",
        lambda m: m.accuracy.recent,
    ),
)
MEMBER_COUNTERS = (
    OfMember(
        "predictions", "Answers whose cached blocks were compared with the prediction.", lambda m: m.accuracy.compared
    ),
    OfMember("wrong_predictions", "Those that differed.", lambda m: m.accuracy.different),
    OfMember("wrong_prediction_blocks", "By how many blocks, added up.", lambda m: m.accuracy.error_blocks),
    OfMember("resyncs", "Times its cache was read anew because predictions failed.", lambda m: m.resyncs),
    OfMember("faults", "Connections lost, time-outs, status 500 and above.", lambda m: m.faults),
)
FEED_GAUGES = (
    OfFeed("index_exact", "1 if the index holds exactly what the replica does.", lambda f: f.exact),
    OfFeed("index_partial", "1 if part of its cache cannot be known, which is said openly.", lambda f: f.partial),
    OfFeed("event_lag_batches", "Batches that it has sent and that are not in the index yet.", lambda f: f.lag_batches),
)
FEED_COUNTERS = (
    OfFeed("event_lost_batches", "Batches that could not be had any more.", lambda f: f.lost_batches),
    OfFeed("event_gaps", "Gaps seen in its stream.", lambda f: f.gaps),
    OfFeed("event_repairs", "Replays and snapshots asked for.", lambda f: f.repairs),
    OfFeed("event_restarts", "Times that it began anew with an empty cache.", lambda f: f.restarts),
    OfFeed("event_digest_mismatches", "Times that its digest differed from the index.", lambda f: f.digest_mismatches),
)
TALLY_COUNTERS = (
    OfTally("prompt_tokens", "Prompt tokens routed.", lambda t: t.prompt_tokens),
    OfTally("matched_tokens", "Those predicted to be cached.", lambda t: t.matched_tokens),
    OfTally(
        "resent_tokens", "Those with which an earlier prompt began that went there, too.", lambda t: t.resent_tokens
    ),
    OfTally("salted_prompts", "Prompts with a cache salt.", lambda t: t.salted),
    OfTally("new_salts", "Those whose salt was not seen there before.", lambda t: t.new_salts),
    OfTally("predicted_blocks", "Cached blocks predicted, of answers that report them.", lambda t: t.blocks_predicted),
    OfTally("reported_blocks", "Cached blocks that these answers reported.", lambda t: t.blocks_reported),
)
ROUTER_GAUGES = (
    OfRouter("open_requests", "Requests that are not answered completely.", lambda r: r.open_requests),
    OfRouter("queue_length", "Requests that wait because every replica is at its limit.", lambda r: len(r.waiting)),
    OfRouter("index_bytes", "Memory that the index takes, estimated.", lambda r: r.placement.index.bytes_used()),
    OfRouter(
        "message_cache_bytes",
        "Memory for the token ids of messages seen before, of at most --message-cache-mb for each model.",
        lambda r: message_cache_bytes(r.members),
    ),
    OfRouter("draining", "1 if the router is about to end.", lambda r: r.leaving),
)
ROUTER_COUNTERS = (
    OfRouter("retries", "Requests sent to another replica before their first byte.", lambda r: r.counts.retries),
    OfRouter("resumes", "Answers that another replica went on with.", lambda r: r.counts.resumes),
    OfRouter("client_disconnects", "Clients that left before the end.", lambda r: r.counts.client_left),
)
REFUSED = Family("refused", "Requests refused by the router itself.")
APPROXIMATE_PROMPTS = Family("approximate_prompts", "Prompts routed by their bytes, not their tokens.")
DECISION = Family("decision_seconds", "CPU time of choosing a replica.")
BLOCKS = Family("index_blocks", "Blocks in the index.")
REQUESTS = Family("requests", "Requests by the status of their answer.")
FIRST_TOKEN = Family("time_to_first_token_seconds", "From a request's arrival to its first byte.")
WHOLE = Family("request_seconds", "From a request's arrival to the end of its answer.")


async def metrics_text(router: Router) -> bytes:
    """Write the metrics a little at a time, so that no request waits for them."""
    loop = asyncio.get_running_loop()
    parts, since_s = [], loop.time()
    for part in text_of(router):
        parts.append(part)
        if loop.time() - since_s > SLICE_S:
            await asyncio.sleep(0)
            since_s = loop.time()
    return "".join(parts).encode()


def text_of(router: Router) -> Iterator[str]:
    """Yield the text in parts, one per replica where there are many. Replicas may come and go between two parts."""
    members = list(router.members)
    blocks = [(member, router.placement.index.blocks(member.slot)) for member in members]  # a slot may be reused later
    for gauge in ROUTER_GAUGES:
        yield _head(gauge, "gauge") + _line(gauge.name, "", gauge.value(router))
    for counter in ROUTER_COUNTERS:
        yield _head(counter, "counter") + _line(f"{counter.name}_total", "", counter.value(router))
    yield from _by_reason(router)
    yield _head(DECISION, "histogram") + _histogram(DECISION.name, "", router.counts.decision_s)
    yield from _of_members([(_labels(replica=member.name), member) for member in members])
    yield _head(BLOCKS, "gauge")
    for member, count_of in blocks:
        lines = (_line(BLOCKS.name, _labels(replica=member.name, medium=each), count_of[each]) for each in count_of)
        yield "".join(lines)
    yield from _of_feeds([(_labels(replica=member.name), router.feeds.state(member.name)) for member in members])
    yield from _of_tallies(
        [
            (_labels(model=model, replica=member.name), tally)
            for member in members
            for model, tally in member.tallies.items()
        ]
    )


def _by_reason(router: Router) -> Iterator[str]:
    refused = [(_labels(code=code), count) for code, count in router.counts.refused.items()]
    yield _head(REFUSED, "counter") + "".join(_line("refused_total", labels, count) for labels, count in refused)
    approximate = [
        (_labels(model=model, reason=reason), count)
        for model, served in router.members.models.items()
        for reason, count in served.tokens.approximate_reasons.items()
    ]
    lines = (_line("approximate_prompts_total", labels, count) for labels, count in approximate)
    yield _head(APPROXIMATE_PROMPTS, "counter") + "".join(lines)


def _of_members(members: list[tuple[str, Member]]) -> Iterator[str]:
    for one in MEMBER_GAUGES:
        yield _head(one, "gauge")
        yield from (_line(one.name, labels, one.value(member)) for labels, member in members)
    for one in MEMBER_COUNTERS:
        yield _head(one, "counter")
        yield from (_line(f"{one.name}_total", labels, one.value(member)) for labels, member in members)


def _of_feeds(states: Iterable[tuple[str, FeedState | None]]) -> Iterator[str]:
    known = [(labels, state) for labels, state in states if state is not None]
    for one in FEED_GAUGES:
        yield _head(one, "gauge")
        yield from (_line(one.name, labels, one.value(state)) for labels, state in known)
    for one in FEED_COUNTERS:
        yield _head(one, "counter")
        yield from (_line(f"{one.name}_total", labels, one.value(state)) for labels, state in known)


def _of_tallies(tallies: list[tuple[str, Tally]]) -> Iterator[str]:
    yield _head(REQUESTS, "counter")
    for labels, tally in tallies:
        lines = (_line("requests_total", f'{labels},status="{each}"', tally.statuses[each]) for each in tally.statuses)
        yield "".join(lines)
    for one in TALLY_COUNTERS:
        yield _head(one, "counter")
        yield from (_line(f"{one.name}_total", labels, one.value(tally)) for labels, tally in tallies)
    yield _head(FIRST_TOKEN, "histogram")
    yield from (_histogram(FIRST_TOKEN.name, labels, tally.first_token_s) for labels, tally in tallies)
    yield _head(WHOLE, "histogram")
    yield from (_histogram(WHOLE.name, labels, tally.request_s) for labels, tally in tallies)


def message_cache_bytes(members: Members) -> int:
    """The bytes of all message caches; adapters share the cache of their base model."""
    caches = {served.tokens.cache for served in members.models.values()}
    return sum(cache.used_bytes for cache in caches if cache is not None)


# ---- the format (Prometheus' text format, 0.0.4)


def _head(one: Named, kind: str) -> str:
    name = f"{PREFIX}{one.name}{'_total' if kind == 'counter' else ''}"
    return f"# HELP {name} {one.meaning}\n# TYPE {name} {kind}\n"


def _line(name: str, labels: str, value: float) -> str:
    number = float(value)
    text = repr(number) if math.isfinite(number) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(number, "NaN")
    return f"{PREFIX}{name}{{{labels}}} {text}\n" if labels else f"{PREFIX}{name} {text}\n"


def _histogram(name: str, labels: str, one: Histogram) -> str:
    buckets, before = one.buckets(), f"{labels}," if labels else ""
    lines = [_line(f"{name}_bucket", f'{before}le="{bound}"', count) for bound, count in buckets]
    return "".join([*lines, _line(f"{name}_count", labels, buckets[-1][1]), _line(f"{name}_sum", labels, one.total)])


def _labels(**values: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
