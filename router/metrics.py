"""What the router's /metrics says; docs/metrics.md has the table, and a test compares the two.

A metric is a line in one of the tables below. Nothing is counted here: the numbers lie where they arise, and are read
when somebody asks. Nothing is global: a process can have several routers.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from router.core import Router
from router.feeds import FeedState
from router.members import Member
from router.status import is_salted
from router.tally import Histogram, Tally

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


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
    OfRouter("index_bytes", "Memory that the index takes, estimated.", lambda r: r.index.bytes_used()),
    OfRouter("draining", "1 if the router takes no new requests.", lambda r: r.draining),
)
ROUTER_COUNTERS = (
    OfRouter("retries", "Requests sent to another replica before their first byte.", lambda r: r.counts.retries),
    OfRouter("resumes", "Answers that another replica went on with.", lambda r: r.counts.resumes),
    OfRouter("client_disconnects", "Clients that left before the end.", lambda r: r.counts.client_left),
)


class RouterCollector(Collector):
    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        router = self._router
        for gauge in ROUTER_GAUGES:
            yield GaugeMetricFamily(named(gauge.name), gauge.meaning, float(gauge.value(router)))
        for counter in ROUTER_COUNTERS:
            yield CounterMetricFamily(named(counter.name), counter.meaning, float(counter.value(router)))
        yield from self._by_reason()
        yield histogram("decision_seconds", "CPU time of choosing a replica.", [], [([], router.counts.decision_s)])
        yield from self._of_members(list(router.members))
        yield from self._of_feeds()
        yield from self._of_tallies()

    def _by_reason(self) -> Iterator[Metric]:
        router = self._router
        refused = CounterMetricFamily(named("refused"), "Requests refused by the router itself.", labels=["code"])
        for code, count in router.counts.refused.items():
            refused.add_metric([code], count)
        yield refused
        approximate = CounterMetricFamily(
            named("approximate_prompts"), "Prompts routed by their bytes, not their tokens.", labels=["model", "reason"]
        )
        for model, served in router.members.models.items():
            for reason, count in served.tokens.approximate_reasons.items():
                approximate.add_metric([model, reason], count)
        yield approximate

    def _of_members(self, members: list[Member]) -> Iterator[Metric]:
        for one in MEMBER_GAUGES:
            yield _labelled(GaugeMetricFamily, one.name, one.meaning, [([m.name], one.value(m)) for m in members])
        for one in MEMBER_COUNTERS:
            yield _labelled(CounterMetricFamily, one.name, one.meaning, [([m.name], one.value(m)) for m in members])
        blocks = GaugeMetricFamily(named("index_blocks"), "Blocks in the index.", labels=["replica", "medium"])
        for member in members:
            for medium, count in self._router.index.blocks(member.slot).items():
                blocks.add_metric([member.name, medium], count)
        yield blocks

    def _of_feeds(self) -> Iterator[Metric]:
        states = [(member.name, self._router.feeds.state(member.name)) for member in self._router.members]
        known = [(name, state) for name, state in states if state is not None]
        for one in FEED_GAUGES:
            yield _labelled(GaugeMetricFamily, one.name, one.meaning, [([n], one.value(s)) for n, s in known])
        for one in FEED_COUNTERS:
            yield _labelled(CounterMetricFamily, one.name, one.meaning, [([n], one.value(s)) for n, s in known])

    def _of_tallies(self) -> Iterator[Metric]:
        tallies = [
            ([model, member.name], tally) for member in self._router.members for model, tally in member.tallies.items()
        ]
        labels = ["model", "replica"]
        requests = CounterMetricFamily(
            named("requests"), "Requests by the status of their answer.", labels=[*labels, "status"]
        )
        for names, tally in tallies:
            for status, count in tally.statuses.items():
                requests.add_metric([*names, str(status)], count)
        yield requests
        for one in TALLY_COUNTERS:
            family = CounterMetricFamily(named(one.name), one.meaning, labels=labels)
            for names, tally in tallies:
                family.add_metric(names, one.value(tally))
            yield family
        first = [(names, tally.first_token_s) for names, tally in tallies]
        whole = [(names, tally.request_s) for names, tally in tallies]
        yield histogram("time_to_first_token_seconds", "From a request's arrival to its first byte.", labels, first)
        yield histogram("request_seconds", "From a request's arrival to the end of its answer.", labels, whole)


def named(name: str) -> str:
    return f"warmroute_router:{name}"


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    meaning: str,
    rows: Iterable[tuple[list[str], float]],
) -> Metric:
    made = family(named(name), meaning, labels=["replica"])
    for labels, value in rows:
        made.add_metric(labels, float(value))
    return made


def histogram(name: str, meaning: str, labels: list[str], rows: Iterable[tuple[list[str], Histogram]]) -> Metric:
    family = HistogramMetricFamily(named(name), meaning, labels=labels)
    for values, one in rows:
        family.add_metric(values, one.buckets(), one.total)
    return family


def metrics_text(router: Router) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RouterCollector(router))
    return generate_latest(registry)
