"""The router's /metrics; docs/metrics.md has the table, and a test compares the two.

A metric is a row in one of the tables below. Nothing is counted here: the numbers are kept where they arise, and read
on request. Nothing is global: a process can have several routers. A thousand replicas make 60,000 lines, so they are
written in parts, between which requests have their turn.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from api.http.prometheus import Histogram, head, histogram, labels, line, metric
from router.lifecycle import Lifecycle
from router.members.asking import Asking
from router.members.members import Member, Members, approximate_prompts
from router.members.tally import Tally
from router.placement.cost import TAKES
from router.placement.placement import Placement
from router.placement.sessions import WorkingSet
from router.placement.waiting import Waiting
from router.proxy.request_summary import RequestCounts
from router.responses import CAUSES, FeedState
from router.tenants.ledger import Ledger
from router.tenants.usage import ClassCounts, Counts
from router.workers.peer_inbox import InboxCounts
from router.workers.peer_links import Links

PREFIX = "warmroute_router:"
SLICE_S = 0.002  # after this much work requests have their turn

T = TypeVar("T")


class Printed(NamedTuple):
    """The parts of a router whose figures are printed."""

    lifecycle: Lifecycle
    members: Members
    placement: Placement
    waiting: Waiting[Any]
    counts: RequestCounts
    ledger: Ledger
    links: Links | None
    now_s: Callable[[], float]
    asking: Asking | None


class Metric(NamedTuple, Generic[T]):
    """A number of a replica, of its event stream, of one model on it, or of the router."""

    name: str
    meaning: str
    value: Callable[[T], float]


MEMBER_GAUGES: tuple[Metric[Member], ...] = (
    Metric("replica_up", "1 if the replica takes requests.", lambda m: m.candidate.unavailable is None),
    Metric("replica_in_flight", "Requests of this router that it is answering.", lambda m: m.candidate.in_flight),
    Metric("replica_running", "Requests that it is answering, as it reports.", lambda m: m.candidate.running),
    Metric("replica_waiting", "Requests that wait in it, as it reports.", lambda m: m.candidate.waiting),
    Metric("replica_queued_tokens", "Prompt tokens ahead of a new request.", lambda m: m.candidate.queued_tokens),
    Metric(
        "replica_prefill_tokens_per_second",
        "Its speed of prefill; 0 while it is not known.",
        lambda m: m.candidate.prefill_tokens_per_s,
    ),
    Metric(
        "replica_salted",
        "1 if its engine is known to keep caches of different salts apart.",
        lambda m: m.profile.separates_salts,
    ),
    Metric("replica_trust", "Weight of its claims of cached tokens; 1 while they are true.", lambda m: m.trust),
    Metric(
        "index_accuracy",
        "Fraction of its last 1,000 answers whose cached blocks were predicted to the block.",
        lambda m: m.accuracy.recent,
    ),
)
MEMBER_COUNTERS: tuple[Metric[Member], ...] = (
    Metric(
        "predictions", "Answers whose cached blocks were compared with the prediction.", lambda m: m.accuracy.compared
    ),
    Metric("wrong_predictions", "Those that differed without an explanation.", lambda m: m.accuracy.different),
    Metric(
        "overtaken_predictions",
        "Those that differed by a block that was stored or evicted before the event came.",
        lambda m: m.accuracy.explained,
    ),
    Metric("wrong_prediction_blocks", "By how many blocks, added up.", lambda m: m.accuracy.error_blocks),
    Metric("resyncs", "Times its cache was read again because predictions failed.", lambda m: m.resyncs),
    Metric(
        "faults",
        "Connections lost, time-outs, status 500 and above; ranks of one URL share it.",
        lambda m: m.server.faults,
    ),
)
FEED_GAUGES: tuple[Metric[FeedState], ...] = (
    Metric("index_exact", "1 if the index holds exactly what the replica does.", lambda f: f.exact),
    Metric("index_partial", "1 if its engine cannot report its whole cache.", lambda f: f.partial),
    Metric("event_lag_batches", "Batches that it has sent and that are not in the index yet.", lambda f: f.lag_batches),
)
FEED_COUNTERS: tuple[Metric[FeedState], ...] = (
    Metric("event_lost_batches", "Batches lost for good.", lambda f: f.lost_batches),
    Metric("event_gaps", "Gaps seen in its stream.", lambda f: f.gaps),
    Metric("event_repairs", "Replays and snapshots asked for what was missing or doubted.", lambda f: f.repairs),
    Metric("event_restarts", "Restarts with an empty cache.", lambda f: f.restarts),
    Metric("event_digest_mismatches", "Times that its digest differed from the index.", lambda f: f.digest_mismatches),
)
TALLY_COUNTERS: tuple[Metric[Tally], ...] = (
    Metric("prompt_tokens", "Prompt tokens routed.", lambda t: t.prompt_tokens),
    Metric("matched_tokens", "Those predicted to be cached.", lambda t: t.matched_tokens),
    Metric("held_tokens", "Those predicted to be cached where most of each prompt was.", lambda t: t.held_tokens),
    Metric(
        "cached_tokens", "Those that were cached, as the engine told, or else as predicted.", lambda t: t.cached_tokens
    ),
    Metric("salted_prompts", "Prompts with a cache salt.", lambda t: t.salted),
    Metric("new_salts", "Those whose salt was not seen there before.", lambda t: t.new_salts),
    Metric("billed_prompts", "Prompts that begin with Claude Code's billing line.", lambda t: t.billed),
    Metric("kept_tokens", "Evicted ones that one more replica's memory would keep.", lambda t: t.kept_tokens),
)
ROUTER_GAUGES: tuple[Metric[Printed], ...] = (
    Metric("open_requests", "Requests in progress.", lambda r: r.lifecycle.open_requests),
    Metric("queue_length", "Requests that wait for a replica with room.", lambda r: len(r.waiting)),
    Metric("index_bytes", "Memory that the index takes, estimated.", lambda r: r.placement.index.bytes_used()),
    Metric(
        "message_cache_bytes",
        "Memory for the token ids of messages seen before, of at most message_cache_mb for each model.",
        lambda r: message_cache_bytes(r.members),
    ),
    Metric("peers", "Other routers that it hears.", lambda r: len(r.links.inbox.peers) if r.links else 0),
    Metric("draining", "1 if the router is about to end.", lambda r: r.lifecycle.leaving),
    Metric(
        "transfer_tokens_per_second",
        "Speed at which KV comes from other replicas; 0 while it is not known.",
        lambda r: r.placement.transfers.measured_tokens_per_s(r.now_s()),
    ),
)
ROUTER_COUNTERS: tuple[Metric[Printed], ...] = (
    Metric("retries", "Requests sent to another replica before their first byte.", lambda r: r.counts.retries),
    Metric("resumes", "Answers continued by another replica.", lambda r: r.counts.resumes),
    Metric("client_disconnects", "Clients that left before the end.", lambda r: r.counts.client_left),
    Metric("peer_requests", "Requests that other routers told of.", lambda r: told(r).requests),
    Metric("peer_ignored_requests", "Those that could not be counted.", lambda r: told(r).ignored),
    Metric("peer_corrected_requests", "Those whose end was not heard of.", lambda r: told(r).corrected),
    Metric("peer_lost_batches", "Messages of other routers that were lost.", lambda r: told(r).lost_batches),
)

KEY_COUNTERS: tuple[Metric[Counts], ...] = (
    Metric("key_requests", "Requests of the key that were meant for replicas.", lambda c: c.requests),
    Metric("key_computed_tokens", "Its prompt tokens that were computed.", lambda c: c.computed_tokens),
    Metric("key_cached_tokens", "Its prompt tokens that were cached.", lambda c: c.cached_tokens),
    Metric("key_generated_tokens", "Tokens generated for it.", lambda c: c.generated_tokens),
    Metric("key_saved_seconds", "Time of prefill that the cache has saved it, estimated.", lambda c: c.saved_s),
)

CLASS_COUNTERS: tuple[Metric[ClassCounts], ...] = (
    Metric("class_answers", "Requests of the class of service whose first token came.", lambda c: c.answered),
    Metric("class_late_answers", "Those whose first token came later than the class wants.", lambda c: c.late),
    Metric(
        "class_refusals", "Requests refused as it, or a class above, cannot be served in time.", lambda c: c.refused
    ),
)

WORKING_SET_GAUGES: tuple[Metric[WorkingSet], ...] = (
    Metric("sessions_waiting", "Sessions that wait to begin.", lambda w: len(w.waiting)),
    Metric("sessions_context_tokens", "Contexts of sessions that will likely go on.", lambda w: w.active_tokens),
    Metric("sessions_bound_tokens", "The most of them; 0: no session waits to begin.", lambda w: w.bound_tokens),
    Metric("sessions_lost_ratio", "Part of what sessions had computed that no cache held any more.", lambda w: w.lost),
)

# Metrics with a writing function of their own: name and meaning.
MODEL_QUEUE = f"{PREFIX}model_queue_length", "Those of one model, also while it has no replica."
REFUSED = f"{PREFIX}refused", "Requests refused by the router itself."
APPROXIMATE_PROMPTS = f"{PREFIX}approximate_prompts", "Prompts routed by their bytes, not their tokens."
ASKED_PROMPTS = f"{PREFIX}asked_prompts", "Prompts whose tokens a replica was to tell, by what came of it."
QUESTIONS = f"{PREFIX}token_questions", "Questions to replicas for tokens, by what they are about."
ANSWER = f"{PREFIX}token_answer_seconds", "From a question for tokens to its answer."
DECISION = f"{PREFIX}decision_seconds", "CPU time of choosing a replica."
BLOCKS = f"{PREFIX}index_blocks", "Blocks in the index."
UNKNOWN = f"{PREFIX}event_unknown_parts", "Event types and fields that are not read, by name."
COMPUTED = f"{PREFIX}prefill_tokens", "Prompt tokens that were computed, by cause."
REQUESTS = f"{PREFIX}requests", "Requests by the status of their answer."
FIRST_TOKEN = f"{PREFIX}time_to_first_token_seconds", "From a request's arrival to its first byte."
PREFILLS = f"{PREFIX}prefills", "Prompts computed for other replicas, by their outcome."
PREFILL = f"{PREFIX}prefill_seconds", "From sending a prompt to its KV being held for another replica."
WHOLE = f"{PREFIX}request_seconds", "From a request's arrival to the end of its answer."


async def metrics_text(printed: Printed, *, shows_keys: bool = True) -> bytes:
    """Write the metrics a little at a time, so that no request waits for them; `shows_keys`: names of API keys, too."""
    loop = asyncio.get_running_loop()
    parts, since_s = [], loop.time()
    for part in text_of(printed, shows_keys=shows_keys):
        parts.append(part)
        if loop.time() - since_s > SLICE_S:
            await asyncio.sleep(0)
            since_s = loop.time()
    return "".join(parts).encode()


def text_of(printed: Printed, *, shows_keys: bool = True) -> Iterator[str]:
    """Yield the text in parts, one per replica where there are many. Replicas may come and go between two parts."""
    members, known = list(printed.members), printed.members
    blocks = [(member, printed.placement.index.blocks(member.slot)) for member in members]  # a slot may be reused later
    yield from _rows(ROUTER_GAUGES, ROUTER_COUNTERS, [("", printed)])
    groups = printed.waiting.groups
    names = dict.fromkeys((*known.expected, *known.models, *groups))
    yield metric("gauge", *MODEL_QUEUE, ((labels(model=name), groups[name]) for name in names))
    sets = [(labels(model=model), one) for model, one in printed.placement.working_sets.items()]
    yield from _rows(WORKING_SET_GAUGES, (), sets)
    refused = printed.counts.refused.items()
    yield metric("counter", *REFUSED, ((labels(code=code), count) for code, count in refused))
    approximate = approximate_prompts(known.models.values()).items()
    by_reason = ((labels(model=model, reason=reason), count) for (model, reason), count in approximate)
    yield metric("counter", *APPROXIMATE_PROMPTS, by_reason)
    if (asking := printed.asking) is not None:
        yield metric("counter", *ASKED_PROMPTS, ((labels(outcome=each), n) for each, n in asking.outcomes.items()))
        yield metric("counter", *QUESTIONS, ((labels(about=each), n) for each, n in asking.questions.items()))
        yield from _histograms(ANSWER, [("", asking.seconds)])
    if shows_keys:
        of_keys = [(labels(key=key), counts) for key, counts in printed.ledger.totals()]
        yield from _rows((), KEY_COUNTERS, of_keys)
    of_classes = [(labels(**{"class": name}), counts) for name, counts in printed.counts.classes.by_name.items()]
    yield from _rows((), CLASS_COUNTERS, of_classes)
    yield from _histograms(DECISION, [("", printed.counts.decision_s)])
    named = [(labels(replica=member.name), member) for member in members]
    yield from _rows(MEMBER_GAUGES, MEMBER_COUNTERS, named)
    yield head(*BLOCKS, "gauge")
    for member, count_of in blocks:
        yield "".join(line(BLOCKS[0], labels(replica=member.name, medium=each), count_of[each]) for each in count_of)
    states = [(labelled, member.feed_state) for labelled, member in named]
    yield from _rows(FEED_GAUGES, FEED_COUNTERS, [(labelled, state) for labelled, state in states if state is not None])
    yield from _by_name(
        UNKNOWN, "name", ((labelled, {} if state is None else state.unknown) for labelled, state in states)
    )
    yield from _by_name(PREFILLS, "outcome", ((labelled, member.prefills) for labelled, member in named))
    prefilling = [(labelled, member) for labelled, member in named if member.spec.role in TAKES["prefill"]]
    yield from _histograms(PREFILL, [(labelled, member.prefill_s) for labelled, member in prefilling])
    tallies = [
        (labels(model=model, replica=member.name), tally)
        for member in members
        for model, tally in member.tallies.items()
    ]
    yield from _by_name(REQUESTS, "status", ((labelled, tally.statuses) for labelled, tally in tallies))
    yield from _rows((), TALLY_COUNTERS, tallies)
    by_cause = ((labelled, {each[:-7]: getattr(tally, each) for each in CAUSES}) for labelled, tally in tallies)
    yield from _by_name(COMPUTED, "cause", by_cause)
    yield from _histograms(FIRST_TOKEN, [(labelled, tally.first_token_s) for labelled, tally in tallies])
    yield from _histograms(WHOLE, [(labelled, tally.request_s) for labelled, tally in tallies])


def _rows(
    gauges: Iterable[Metric[T]], counters: Iterable[Metric[T]], labelled: Sequence[tuple[str, T]]
) -> Iterator[str]:
    for kind, rows in (("gauge", gauges), ("counter", counters)):
        for row in rows:
            name = f"{PREFIX}{row.name}"
            yield head(name, row.meaning, kind)
            whole = f"{name}_total" if kind == "counter" else name
            yield from (line(whole, labels, row.value(one)) for labels, one in labelled)


def _by_name(named: tuple[str, str], label: str, labelled: Iterable[tuple[str, Mapping[Any, float]]]) -> Iterator[str]:
    """A counter of which each replica, or model there, has several by another label."""
    yield head(*named, "counter")
    for before, counts in labelled:
        lines = (
            line(f"{named[0]}_total", f"{before},{labels(**{label: str(each)})}", counts[each]) for each in list(counts)
        )
        yield "".join(lines)


def _histograms(named: tuple[str, str], labelled: Iterable[tuple[str, Histogram]]) -> Iterator[str]:
    yield head(*named, "histogram")
    yield from (histogram(named[0], labels, one) for labels, one in labelled)


def told(printed: Printed) -> InboxCounts:
    return InboxCounts() if printed.links is None else printed.links.inbox.counts


def message_cache_bytes(members: Members) -> int:
    """The bytes of all message caches; adapters share the cache of their base model."""
    caches = {served.tokens.cache for served in members.models.values()}
    return sum(cache.used_bytes for cache in caches if cache is not None)
