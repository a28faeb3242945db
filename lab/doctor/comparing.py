"""Turns two looks into the figures for the rules. Pure; a counter that fell was restarted in between."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from router.console.samples import Samples
from router.dashboard.doctor.engine_metrics import MetricsDelta, engine_figures
from router.dashboard.doctor.figures import (
    SAID,
    DecisionSample,
    DifferingShape,
    EngineFigures,
    Figures,
    ReplicaFigures,
    RouterFigures,
    RoutingFigures,
)
from router.responses import DecisionRecord, ReplicaStatus

ROUTER = "warmroute_router:"
GPU = "GPU"
COUNTERS = {  # of the router, by their fields of RoutingFigures
    **{name: name for name in ("resyncs", "faults", "predictions", "wrong_predictions", "requests", "new_salts")},
    **{name: name for name in ("prompt_tokens", "matched_tokens", "resent_tokens", "reported_blocks")},
    **{name: f"event_{name}" for name in ("lost_batches", "gaps", "repairs", "digest_mismatches", "restarts")},
    "wrong_blocks": "wrong_prediction_blocks",
    "salted": "salted_prompts",
    "billed": "billed_prompts",
}


class Loaded(Struct, frozen=True):
    """The fields of one of our replicas' GET /load that are used here."""

    model: str = ""
    endpoints: dict[str, Any] | None = None


class OfRouter(NamedTuple):
    metrics: Samples
    replicas: list[ReplicaStatus]
    decisions: list[DecisionRecord] | None  # None: they may not be read
    differing: tuple[DifferingShape, ...] = ()


class OfReplica(NamedTuple):
    metrics: Samples
    load: Loaded | None = None  # None: it is not one of ours, or demands a key


class Look(NamedTuple):
    at_s: float
    router: OfRouter | None
    replicas: dict[str, OfReplica | str]  # by URL; why, if there is no answer


def figures_of(first: Look, between: Sequence[Samples], last: Look) -> Figures:
    known_urls = set() if last.router is None else {one.url.rstrip("/") for one in last.router.replicas}
    replicas = []
    for url, answer in last.replicas.items():
        if url not in known_urls:
            own = _own(first.replicas.get(url), answer, None)
            load = answer.load if isinstance(answer, OfReplica) else None
            replicas.append(
                ReplicaFigures(
                    name=url.partition("://")[2],
                    engine=own.engine if own else "",
                    model=load.model if load else "",
                    block_tokens=own.block_tokens if own else 0,
                    own=own,
                )
            )
    router, notes = None, []
    if first.router is not None and last.router is not None:
        readings = [first.router.metrics, *between, last.router.metrics]
        change = MetricsDelta(first.router.metrics, last.router.metrics)
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


# ---- a replica


def _known(
    known: ReplicaStatus, readings: Sequence[Samples], change: MetricsDelta, first: Look, last: Look
) -> ReplicaFigures:
    routed = _routed(known, readings, change)
    url = known.url.rstrip("/")
    grown = routed.index_blocks - (change.first.total(f"{ROUTER}index_blocks", replica=known.name, medium=GPU) or 0.0)
    index = (routed.index_blocks, grown) if known.events is not None else None
    own = _own(first.replicas.get(url), last.replicas.get(url), index, known.rank)
    return ReplicaFigures(
        name=known.name,
        engine=known.engine,
        model=known.models[0] if known.models else "",
        block_tokens=(own.block_tokens if own else 0) or known.block_size or 0,
        own=own,
        routed=routed,
    )


def _routed(known: ReplicaStatus, readings: Sequence[Samples], change: MetricsDelta) -> RoutingFigures:
    name = known.name

    def gauge(reading: Samples, metric: str) -> float:
        return reading.total(f"{ROUTER}{metric}", replica=name) or 0.0

    told: dict[str, Any] = {
        **{field: getattr(known, field) for field in ("available", *SAID)},
        **{field: change.added(f"{ROUTER}{counter}_total", replica=name) for field, counter in COUNTERS.items()},
    }
    there = [reading for reading in readings if reading.total(f"{ROUTER}replica_up", replica=name) is not None]
    return RoutingFigures(
        **told,
        overclaim=None if known.events is None else known.events.overclaim,
        unknown={} if known.events is None else known.events.unknown,
        has_events=known.events is not None and not known.events.unreached,
        predictions_ever=change.last.total(f"{ROUTER}predictions_total", replica=name) or 0.0,
        lag_batches=int(min((gauge(one, "event_lag_batches") for one in there), default=0)),
        refused=change.added(f"{ROUTER}requests_total", replica=name, status="429"),
        index_blocks=change.last.total(f"{ROUTER}index_blocks", replica=name, medium=GPU) or 0.0,
        busy=tuple(
            max(gauge(one, "replica_in_flight"), gauge(one, "replica_running") + gauge(one, "replica_waiting"))
            for one in there
        ),
        queued_tokens=tuple(gauge(one, "replica_queued_tokens") for one in there),
    )


def _own(
    first: OfReplica | str | None,
    last: OfReplica | str | None,
    index: tuple[float, float] | None,
    rank: int | None = None,
) -> EngineFigures | None:
    """`index`: how many of its blocks the router knows, and how many more than before."""
    if not isinstance(first, OfReplica) or not isinstance(last, OfReplica):
        return None
    sends_events = None if last.load is None else last.load.endpoints is not None
    before, now = (one.metrics if rank is None else one.metrics.of_rank(rank) for one in (first, last))
    return engine_figures(before, now, index, sends_events)


# ---- the router


def _router(first: Look, last: Look, change: MetricsDelta) -> RouterFigures:
    assert first.router is not None and last.router is not None, "it was asked"
    decisions, before = last.router.decisions, {one.request_id for one in first.router.decisions or ()}
    if decisions is not None:  # earlier ones are recognized by id, since clocks may differ
        decisions = [one for one in decisions if one.request_id not in before]
    chosen = [one for one in decisions or () if one.chosen is not None]
    held = list(map(_held, chosen))
    return RouterFigures(
        policy=chosen[0].policy if chosen else "",
        requests=change.added(f"{ROUTER}requests_total"),
        refused=change.by(f"{ROUTER}refused_total", "code"),
        approximate=change.by(f"{ROUTER}approximate_prompts_total", "reason"),
        missed_tokens=sum(max(0.0, others - ours) for ours, others in held),
        chosen_tokens=sum(one.prompt_tokens for one in chosen),
        choices=None
        if decisions is None
        else tuple(
            DecisionSample(at_s=one.ts - one.duration_s, replica=one.chosen or "", cached=ours > others)
            for one, (ours, others) in zip(chosen, held, strict=True)
        ),
        differing=last.router.differing,
    )


def _held(decision: DecisionRecord) -> tuple[float, float]:
    """Return the prompt tokens that the chosen replica held, and the best of the other eligible ones."""
    ours = [one.matched_tokens for one in decision.candidates if one.name == decision.chosen]
    others = [
        one.matched_tokens for one in decision.candidates if one.name != decision.chosen and one.cost_s is not None
    ]
    return sum(ours), max(others, default=0.0)
