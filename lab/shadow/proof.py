"""Requests sent through a router of any kind, and what was said of their caches held against the engines' events."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Literal, TypeAlias
from uuid import uuid4

import msgspec
from msgspec import Raw, Struct

from api.process.settings import Unusable
from api.process.tasks import check, end, first
from lab.bench.client import Endpoint, Outcome
from lab.bench.load import LoadGenerator
from lab.bench.measure import Plan
from lab.bench.probe import probe, question
from lab.bench.prompts import Form, Words
from lab.shadow.incoming import Incoming
from lab.shadow.placing import Placing, Record
from lab.shadow.replicas import changes, followed, following, sampled, summed, wait_ready
from lab.shadow.twin import speeds_of
from lab.shadow.watch import SETTLE_S
from lab.writing import aligned
from router.config import RouterConfig
from router.console.formatting import duration
from router.members.broken import Broken
from router.members.feed import SETTLED_S, Moment, ReplicaFeed
from router.placement.index import APPROXIMATE
from router.proxy.services import Services
from router.responses import DecisionRecord
from router.tenants.keys import Key, keys_from_options

LAG_TICKS = 3  # a router may learn of a change this many `SETTLE_S` later
ENOUGH = 0.9  # the share of answers that the events have to confirm

# An answer's cached tokens are those of the events when it was sent; or others, and the block at which they part was
# stored for another request, or evicted, meanwhile; or others, and no event says why.
Finding: TypeAlias = Literal["same", "moved", "different", "unknown"]


Points: TypeAlias = Mapping[str, tuple[ReplicaFeed, Moment]]  # replicas' streams, and how far each has come


def points_of(services: Services) -> Points:
    return {one.name: (one.feed, one.feed.moment()) for one in services.members if one.feed is not None}


class Evidence(Struct, kw_only=True):
    """One answer; lengths are in tokens, and from the events unless something else is said."""

    request_id: str
    tokens: int
    exact: bool  # the prompt's tokens are
    replica: str | None  # that served it; None: not known
    known_by: str | None
    cached: dict[str, int]  # at each replica when it was sent
    held: int  # at its own
    best: int  # at the one that had most
    pooled: int  # in all, as if they were one cache
    told: int | None  # by the answer, in whole blocks
    parts: int  # the rest: of a block that begins alike, which no event tells
    finding: Finding
    predicted: int | None  # by the router
    called_exact: bool
    prediction: Finding | None  # the told tokens beside those
    elsewhere: int  # computed though another replica had it
    evicted: int  # computed though it had been cached


class Sent:
    """A request, with the caches and the point in each replica's stream when it was sent, and shortly before."""

    def __init__(self, services: Services, outcome: Outcome, record: Record, hits: dict[str, float], earlier: Points):
        self.outcome, self.record, self.sent_s = outcome, record, services.now_s()
        self.since, self.earlier = points_of(services), earlier
        self.ended_s: float | None = None
        self.decision: DecisionRecord | None = None
        self.findings: dict[str, Finding] = {}  # by the replica that may have served it
        self.prediction: Finding | None = None
        size, index = record.block_tokens, services.placement.index_of(record.block_tokens)
        most = (record.tokens - 1) // size  # the last token is always computed
        self.hits = {name: min(most, int(hit) // size) * size for name, hit in hits.items()}
        leading = min(most, sum(1 for _ in takewhile(bool, index.holders(record.keys))))
        self.pooled = max(leading * size, *self.hits.values())
        known, _ = index.gone.leading(list(record.keys[self.pooled // size : most]), 0)
        self.once = self.pooled + known * size  # leading tokens that are or were cached anywhere

    def compared(self, held: int, point: tuple[ReplicaFeed, Moment] | None, others: Iterable["Sent"]) -> Finding:
        """The told tokens beside those that were held, or predicted, at that point of a replica's stream or later."""
        told, keys, size = self.outcome.cached_tokens, self.record.keys, self.record.block_tokens
        feed, moment = point or (None, None)
        if told is None or feed is None or moment is None or not moment.exact:
            return "unknown"
        part, last = sorted((held // size, told // size))
        if part == last:
            return "same"
        is_more = told > held
        if is_more and not any(other.may_store(part, self) for other in others if other is not self):
            return "different"  # if the block was stored, it was for this request itself
        changed = feed.has_changed(moment, keys[:last] if feed.has_groups else keys[part : part + 1], stored=is_more)
        return "unknown" if changed is None else "moved" if changed else "different"

    def may_store(self, part: int, other: "Sent") -> bool:
        """Tell whether it was on its way beside another, and has its block in the prompt, or perhaps in the answer."""
        keys, wanted = self.record.keys, other.record.keys
        if self.sent_s > (other.ended_s or 0) or (self.ended_s is not None and self.ended_s < other.sent_s - SETTLED_S):
            return False
        if part < len(keys):
            return keys[part : part + 1] == wanted[part : part + 1]
        reached = self.record.tokens + (self.outcome.output_tokens or 0)
        return part < reached // self.record.block_tokens and keys == wanted[: len(keys)]

    def judge(self, others: Iterable["Sent"]) -> None:
        self.findings = {name: self.compared(held, self.since.get(name), others) for name, held in self.hits.items()}
        predicted = None if self.decision is None else self.decision.predicted_cached_tokens
        point = self.earlier.get(self.outcome.replica or "")
        self.prediction = None if predicted is None else self.compared(predicted, point, others)

    def evidence(self) -> Evidence:
        record, hits, size, told = self.record, self.hits, self.record.block_tokens, self.outcome.cached_tokens
        parts, told = (0, None) if told is None else (told % size, told - told % size)
        replica, known_by, decision = record.replica, record.source, self.decision
        if self.outcome.replica in hits:
            replica, known_by = self.outcome.replica, "told"
        elif known_by == "one of several":  # that is a guess
            replica = None
        may_be = hits if replica is None else [replica]
        findings = {self.findings[name] for name in may_be}
        finding = findings.pop() if replica is not None or findings == {"same"} else "unknown"
        held, best = min(hits[name] for name in may_be), max(hits.values())
        cached = held if told is None else told
        return Evidence(
            request_id=record.request_id,
            tokens=record.tokens,
            exact=record.exact,
            replica=replica,
            known_by=known_by,
            cached=hits,
            held=held,
            best=best,
            pooled=self.pooled,
            told=told,
            parts=parts,
            finding=finding,
            predicted=None if decision is None else decision.predicted_cached_tokens,
            called_exact=decision is not None and bool(decision.prediction_exact),
            prediction=self.prediction,
            elsewhere=max(0, best - max(held, cached)),
            evicted=max(0, self.once - max(best, cached)) + max(0, held - cached),
        )


class Witness:
    """`sees` each request before it is sent, and judges each answer when the events of its time have come."""

    def __init__(self, services: Services, endpoint: Endpoint, key: Key | None) -> None:
        self.skipped: Counter[str] = Counter()
        self.all: list[Sent] = []
        self._placing = Placing(services, self.skipped, key)
        self._services, self._endpoint = services, endpoint
        self._points = deque([points_of(services)], maxlen=LAG_TICKS)

    async def sees(self, outcome: Outcome, path: str, body: bytes) -> None:
        outcome.request_id = f"prove-{uuid4().hex}"
        record = await self._placing.take(Incoming(raw_body=Raw(body), path=path, request_id=outcome.request_id))
        if record is not None and record.at_once is not None and record.block_tokens != APPROXIMATE:
            self.all.append(Sent(self._services, outcome, record, record.at_once.hits, self._points[0]))

    async def watch(self) -> None:
        """Judge until it is cancelled."""
        while True:
            await asyncio.sleep(SETTLE_S)
            now_s = self._services.now_s()
            self._placing.whereabouts.settle(now_s)
            self._points.append(points_of(self._services))
            for sent in self._open():
                if sent.ended_s is None:
                    sent.ended_s = now_s
                elif now_s >= sent.ended_s + SETTLED_S:  # later, its events would be forgotten
                    if sent.outcome.replica is not None:
                        sent.decision = await decided(self._endpoint, sent.record.request_id)
                    sent.judge(self.all)

    def _open(self) -> list[Sent]:
        return [sent for sent in self.all if sent.outcome.end_s and not sent.findings]

    async def end(self) -> None:
        while self._open():
            await asyncio.sleep(SETTLE_S)
        self._placing.whereabouts.end()


async def decided(endpoint: Endpoint, request_id: str) -> DecisionRecord | None:
    """Ask a router of ours for its decision; None: it does not remember it, or we may not ask."""
    try:
        answer = await endpoint.get(f"/decisions/{request_id}")
        return msgspec.json.decode(answer.body, type=DecisionRecord) if answer.status == 200 else None
    except (Broken, msgspec.MsgspecError):
        return None


class Certificate(Struct, kw_only=True):
    url: str
    verdict: Literal["proved", "refuted", "unknown"] = "unknown"
    says: str = ""
    seconds: float
    requests: int
    failed: int
    skipped: dict[str, int]
    trees: int
    doubts: dict[str, str]  # replica -> why its tree may differ from its cache
    answers: dict[Finding, int]
    predictions: dict[str, int]  # all, and of those called exact the right and the wrong ones
    tokens: dict[str, int]  # sums over the answers, by the field of the evidence
    counted_tokens: int  # prompts, by the engines' own counters
    counted_hits: int
    prefill_tokens_per_s: float
    assumed: tuple[str, ...]
    regret_s: dict[str, float]  # of the replicas' time


async def salting(services: Services, form: Form, key: str | None) -> Key | None:
    """The client's key, if by its salt the replicas store prompts; raise Unusable if they do by another."""
    asked = Incoming(raw_body=Raw(question(form)), path=form.path)
    is_unsure = any(services.doubt(member) is not None for member in services.members)
    for own in (None, *keys_from_options((), key)):
        record = await Placing(services, Counter(), own).take(asked)
        if record is None or is_unsure or record.block_tokens == APPROXIMATE:
            return None
        if any(services.placement.index_of(record.block_tokens).holders(record.keys)):
            return own
    raise Unusable(
        "not provable: the replicas' events tell of other prompts than were sent; either they have salts, as keys of a "
        "file give them (without salt = false), or the tokenizer is another, or not all replicas are given"
    )


async def proved(
    plan: Plan, config: RouterConfig, on_end: Callable[[int], object]
) -> tuple[Certificate, list[Evidence]]:
    """Send the requests while the replicas are followed; raise Unusable if they cannot be."""
    async with following(config) as services:
        await wait_ready(services)
        servers, wish = services.members.servers, plan.wish
        if wish.model is None and len(services.members.models) == 1:  # some routers name no model, or none that is
            wish = wish._replace(model=next(iter(services.members.models)))
        model = services.members.models.get(wish.model or "")
        if model is not None and model.tokens.why_not is not None:
            raise Unusable(f"{wish.model}: {model.tokens.why_not}; give its folder: --model-dir {wish.model}=DIR")
        endpoint = Endpoint(plan.target, plan.key, plan.timeout_s)
        watching: set[asyncio.Task[None]] = set()
        try:
            form, probed = await probe(endpoint, wish)
            await asyncio.sleep(SETTLED_S)  # the engines' events and counters have the probe's requests by then
            witness = Witness(services, endpoint, await salting(services, form, plan.key))
            watching.add(asyncio.create_task(witness.watch()))
            form = form._replace(words=Words(wish.seed, probed.tokens_per_word))
            load = LoadGenerator(endpoint, form, plan.arrivals(wish.seed), plan.limits, on_end, witness.sees)
            before, began_s = await sampled(servers.values()), time.monotonic()
            outcomes = (await load.run()).outcomes
            seconds = time.monotonic() - began_s
            check(await first(asyncio.create_task(witness.end()), *watching))
        finally:
            await end(watching)
            endpoint.close()
        after = await sampled(servers.values())
        replicas, counted = followed(services, after), summed(changes(before, after).values())
    evidence = [sent.evidence() for sent in witness.all if sent.findings and sent.outcome.error is None]
    summable = ("tokens", "told", "held", "best", "pooled", "elsewhere", "evicted")
    tokens = {name: sum(getattr(one, name) or 0 for one in evidence) for name in summable}
    exact, speeds = [one for one in evidence if one.called_exact], speeds_of(replicas, counted)
    found = Certificate(
        url=plan.target.url,
        seconds=seconds,
        requests=len(outcomes),
        failed=sum(outcome.error is not None for outcome in outcomes),
        skipped=dict(witness.skipped),
        trees=len(replicas),
        doubts={one.name: one.doubt for one in replicas if one.doubt is not None},
        answers=dict(Counter(one.finding for one in evidence)),
        predictions={
            "all": sum(one.predicted is not None for one in evidence),
            "exact": len(exact),
            "right": sum(one.prediction == "same" for one in exact),
            "wrong": sum(one.prediction == "different" for one in exact),
        },
        tokens=tokens,
        counted_tokens=int(counted.query_tokens),
        counted_hits=int(counted.hit_tokens),
        prefill_tokens_per_s=speeds.prefill_tokens_per_s,
        assumed=speeds.assumed,
        regret_s={name: tokens[name] / speeds.prefill_tokens_per_s for name in ("elsewhere", "evicted")},
    )
    judge(found)
    return found, evidence


def judge(found: Certificate) -> None:
    """Set the verdict, and say it in a sentence."""
    tokens, told, count = found.tokens, found.predictions, found.requests - found.failed
    different = found.answers.get("different", 0)
    sure = sum(found.answers.get(name, 0) for name in ("same", "moved"))
    says = f"{sure:,} of {count:,} answers told what the engines' events say"
    if different:
        found.verdict, says = "refuted", f"{different:,} of {count:,} answers contradict the engines' events"
    elif told["wrong"]:
        found.verdict, says = "refuted", f"{told['wrong']:,} of {told['exact']:,} predictions called exact were wrong"
    elif found.counted_tokens == tokens["tokens"] and found.counted_hits != tokens["told"]:
        found.verdict = "refuted"
        says = f"the answers told {tokens['told']:,} cached tokens, and the engines counted {found.counted_hits:,}"
    elif count and sure >= ENOUGH * count and not found.doubts:
        found.verdict = "proved"
        says += f", and no prediction called exact was wrong, of {told['exact']:,}" * bool(told["exact"])
    found.says = says


def lines(found: Certificate) -> Iterator[str]:
    tokens, told = found.tokens, found.predictions
    skipped = f", {sum(found.skipped.values()):,} not placed" if found.skipped else ""
    yield f"{found.url}: {found.requests:,} requests in {duration(found.seconds)}, {found.failed:,} failed{skipped}"
    yield f"trees: {found.trees - len(found.doubts)} of {found.trees} exact"
    for name, doubt in found.doubts.items():
        yield f"  {name}: {doubt}"
    rows = {
        "told by the answers": tokens["told"],
        "counted by the engines": found.counted_hits,
        "by the events, when each was sent": tokens["held"],
        "at the best replica then": tokens["best"],
        "in one pooled cache then": tokens["pooled"],
    }
    whole = max(1, tokens["tokens"])
    yield from aligned(
        [
            ("cached", "tokens", f"of {whole:,}"),
            *((name, f"{value:,}", f"{value / whole:.1%}") for name, value in rows.items()),
        ]
    )
    words = {"same": "as the events say", "moved": "changed on the way", "different": "different", "unknown": "unknown"}
    yield f"answers: {', '.join(f'{count:,} {words[name]}' for name, count in found.answers.items())}"
    moved = told["exact"] - told["right"] - told["wrong"]
    right = f": {told['right']:,} right, {moved:,} changed on the way, {told['wrong']:,} wrong" if told["exact"] else ""
    yield f"predictions: {told['all']:,} told, {told['exact']:,} called exact{right}"
    for name, says in (("elsewhere", "another replica had them"), ("evicted", "they had been evicted")):
        yield f"computed though {says}: {tokens[name]:,} tokens, {duration(found.regret_s[name])} of GPU time"
    yield f"prefill: {found.prefill_tokens_per_s:,.0f} tokens/s{''.join(f'; assumed: {one}' for one in found.assumed)}"
    yield f"{found.verdict}: {found.says}"
