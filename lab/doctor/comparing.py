"""Two looks become the figures that the rules judge by. Pure; a counter that fell was begun anew in between."""

from collections.abc import Sequence

from lab.doctor.answers import Decision, Known, Look, OfReplica
from lab.doctor.figures import Choice, Figures, Own, Replica, Routed, RouterFigures
from lab.doctor.samples import Samples

ROUTER = "warmroute_router:"
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total", "sglang:prompt_tokens_total")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total")
PROMPTS = ("vllm:request_prompt_tokens_count", "vllm:request_success_total", "sglang:num_requests_total")
PROMPT_TOKENS = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
PREEMPTIONS = (
    "vllm:num_preemptions_total",
    "sglang:num_retracted_requests_total",
    "sglang:num_retracted_reqs_total",
)
GPU = "GPU"


class Between:
    """What has changed from one reading of a /metrics to another."""

    def __init__(self, first: Samples, last: Samples) -> None:
        self.first, self.last = first, last

    def grown(self, *names: str, **labels: str) -> float | None:
        """None: nobody counts it."""
        now = self.last.total(*names, **labels)
        before = self.first.total(*names, **labels) or 0.0
        return None if now is None else now if now < before else now - before

    def added(self, *names: str, **labels: str) -> float:
        return self.grown(*names, **labels) or 0.0

    def by(self, name: str, label: str) -> dict[str, float]:
        before = self.first.by(name, label)
        grown = {key: now - before.get(key, 0.0) for key, now in self.last.by(name, label).items()}
        return {key: change for key, change in grown.items() if change > 0}


def figures_of(first: Look, between: Sequence[Samples], last: Look) -> Figures:
    replicas = [_alone(url, first, last) for url in last.replicas if url not in _known_urls(last)]
    router, notes = None, []
    if first.router is not None and last.router is not None:
        readings = [first.router.metrics, *between, last.router.metrics]
        change = Between(first.router.metrics, last.router.metrics)
        replicas = [_known(known, readings, change, first, last) for known in last.router.replicas] + replicas
        router = _router(first, last, change)
        if router.choices is None:
            notes.append("the router's decisions may not be read: herding was judged by queues alone; see --admin-key")
    for url, answer in last.replicas.items():
        if isinstance(answer, str):
            notes.append(f"{url}/metrics cannot be had ({answer}): that replica was judged by the router alone")
    return Figures(
        window_s=max(last.at_s - first.at_s, 1e-3), router=router, replicas=tuple(replicas), notes=tuple(notes)
    )


def _known_urls(look: Look) -> set[str]:
    return set() if look.router is None else {one.url.rstrip("/") for one in look.router.replicas}


# ---- a replica


def _alone(url: str, first: Look, last: Look) -> Replica:
    """One that no router was asked about."""
    own = _own(first.replicas.get(url), last.replicas[url], None)
    answer = last.replicas[url]
    load = answer.load if isinstance(answer, OfReplica) else None
    return Replica(
        name=url.partition("://")[2],
        engine=own.engine if own else "",
        model=load.model if load else "",
        block_tokens=own.block_tokens if own else 0,
        own=own,
    )


def _known(known: Known, readings: Sequence[Samples], change: Between, first: Look, last: Look) -> Replica:
    routed = _routed(known, readings, change)
    url = known.url.rstrip("/")
    grown = routed.index_blocks - (change.first.total(f"{ROUTER}index_blocks", replica=known.name, medium=GPU) or 0.0)
    index = (routed.index_blocks, grown) if known.events is not None else None
    own = _own(first.replicas.get(url), last.replicas.get(url), index)
    return Replica(
        name=known.name,
        engine=known.engine,
        model=known.models[0] if known.models else "",
        block_tokens=(own.block_tokens if own else 0) or known.block_size or 0,
        own=own,
        routed=routed,
    )


def _routed(known: Known, readings: Sequence[Samples], change: Between) -> Routed:
    name = known.name

    def added(metric: str) -> float:
        return change.added(f"{ROUTER}{metric}_total", replica=name)

    def gauge(reading: Samples, metric: str) -> float:
        return reading.total(f"{ROUTER}{metric}", replica=name) or 0.0

    there = [reading for reading in readings if reading.total(f"{ROUTER}replica_up", replica=name) is not None]
    return Routed(
        available=known.available,
        why=known.why,
        breaker=known.breaker,
        state=known.state,
        inexact=known.inexact,
        has_events=known.events is not None,
        lag_batches=int(min((gauge(one, "event_lag_batches") for one in there), default=0)),
        lost_batches=added("event_lost_batches"),
        gaps=added("event_gaps"),
        repairs=added("event_repairs"),
        digest_mismatches=added("event_digest_mismatches"),
        restarts=added("event_restarts"),
        resyncs=added("resyncs"),
        faults=added("faults"),
        predictions=added("predictions"),
        wrong_predictions=added("wrong_predictions"),
        wrong_blocks=added("wrong_prediction_blocks"),
        requests=added("requests"),
        refused=change.added(f"{ROUTER}requests_total", replica=name, status="429"),
        prompt_tokens=added("prompt_tokens"),
        matched_tokens=added("matched_tokens"),
        resent_tokens=added("resent_tokens"),
        salted=added("salted_prompts"),
        new_salts=added("new_salts"),
        reported_blocks=added("reported_blocks"),
        index_blocks=change.last.total(f"{ROUTER}index_blocks", replica=name, medium=GPU) or 0.0,
        busy=tuple(
            max(gauge(one, "replica_in_flight"), gauge(one, "replica_running") + gauge(one, "replica_waiting"))
            for one in there
        ),
        queued_tokens=tuple(gauge(one, "replica_queued_tokens") for one in there),
    )


def _own(first: OfReplica | str | None, last: OfReplica | str | None, index: tuple[float, float] | None) -> Own | None:
    """`index`: how many of its blocks the router knows, and how many more than before."""
    if not isinstance(first, OfReplica) or not isinstance(last, OfReplica):
        return None
    now, change = last.metrics, Between(first.metrics, last.metrics)
    if now.total(*PROMPT_TOKENS) is None:
        return None  # something else has such an address
    engine = _engine(now)
    block_tokens, total_blocks = _cache_size(now)
    full = _full(now, total_blocks)
    if full is None and index is not None and total_blocks:
        full = min(1.0, index[0] / total_blocks)
    queries, hits = change.grown(*QUERIES), change.grown(*HITS)
    usages = [one for one in (first.metrics.most(*USAGE), now.most(*USAGE)) if one is not None]
    return Own(
        engine=engine,
        block_tokens=block_tokens,
        total_blocks=total_blocks,
        usage=min(usages, default=None),
        full=full,
        evicted_blocks=_evicted(change, block_tokens, index),
        query_tokens=queries,
        hit_tokens=hits,
        query_blocks=change.grown("warmroute:prefix_cache_query_blocks_total"),
        prompts=change.added(*PROMPTS),
        prompt_tokens=change.added(*PROMPT_TOKENS),
        preemptions=change.grown(*PREEMPTIONS),
        refused=change.added("warmroute:requests_refused_total", reason="full"),
        caching=_caching(now),
        cached_blocks=now.total("warmroute:cached_blocks"),
        prompt_tokens_ever=now.total(*PROMPT_TOKENS) or 0.0,
        hit_tokens_ever=now.total(*HITS),
        events_ever=now.total("warmroute:kv_events_total"),
        draining=bool(now.total("warmroute:draining")),
        sends_events=None if last.load is None else last.load.endpoints is not None,
    )


def _engine(metrics: Samples) -> str:
    if metrics.total("warmroute:num_blocks") is not None:
        return "warmroute"
    return "sglang" if metrics.total("sglang:prompt_tokens_total") is not None else "vllm"


def _cache_size(metrics: Samples) -> tuple[int, int]:
    """Tokens in a block, and blocks; 0: not said."""
    names = (
        ("vllm:cache_config_info", "block_size", "num_gpu_blocks"),
        ("sglang:cache_config_info", "page_size", "num_pages"),
    )
    for name, size, count in names:
        said = (metrics.label(name, size) or "", metrics.label(name, count) or "")
        if said[0].isdecimal():
            return int(said[0]), int(said[1]) if said[1].isdecimal() else 0
    return 0, 0


def _full(metrics: Samples, total_blocks: int) -> float | None:
    free, reusable = metrics.total("warmroute:free_blocks"), metrics.total("warmroute:unreferenced_blocks")
    if free is None or reusable is None or not total_blocks:
        return None
    return 1 - (free - reusable) / total_blocks


def _evicted(change: Between, block_tokens: int, index: tuple[float, float] | None) -> float | None:
    """In blocks. What nobody counts is what came in and did not make the cache grow."""
    counted = change.grown("warmroute:evictions_total")
    if counted is not None or not block_tokens:
        return counted
    tokens, queries = change.grown("sglang:evicted_tokens_total"), change.grown(*QUERIES)
    if tokens is not None:
        return tokens / block_tokens
    if index is None or queries is None:
        return None
    return max(0.0, (queries - change.added(*HITS)) / block_tokens - index[1])


def _caching(metrics: Samples) -> bool | None:
    said = metrics.label("vllm:cache_config_info", "enable_prefix_caching")
    return None if said is None or said.lower() not in ("true", "false") else said.lower() == "true"


# ---- the router


def _router(first: Look, last: Look, change: Between) -> RouterFigures:
    assert first.router is not None and last.router is not None, "it was asked"
    decisions = _new(first.router.decisions, last.router.decisions)
    chosen = [one for one in decisions or () if one.chosen is not None]
    return RouterFigures(
        policy=chosen[0].policy if chosen else "",
        requests=change.added(f"{ROUTER}requests_total"),
        refused=change.by(f"{ROUTER}refused_total", "code"),
        approximate=change.by(f"{ROUTER}approximate_prompts_total", "reason"),
        missed_tokens=sum(map(_missed, chosen)),
        chosen_tokens=sum(one.prompt_tokens for one in chosen),
        choices=None if decisions is None else tuple(map(_choice, chosen)),
    )


def _new(before: list[Decision] | None, now: list[Decision] | None) -> list[Decision] | None:
    """Clocks may differ, so what was there before is known by its id."""
    if now is None:
        return None
    old = {one.request_id for one in before or ()}
    return [one for one in now if one.request_id not in old]


def _held(decision: Decision) -> tuple[float, float]:
    """How much of its prompt the chosen replica held, and the best of the others that could take it."""
    ours = [one.matched_tokens for one in decision.candidates if one.name == decision.chosen]
    others = [
        one.matched_tokens for one in decision.candidates if one.name != decision.chosen and one.cost_s is not None
    ]
    return sum(ours), max(others, default=0.0)


def _missed(decision: Decision) -> float:
    ours, others = _held(decision)
    return max(0.0, others - ours)


def _choice(decision: Decision) -> Choice:
    ours, others = _held(decision)
    at_s = decision.ts - decision.duration_s
    return Choice(at_s=at_s, replica=decision.chosen or "", cached=ours > others)
