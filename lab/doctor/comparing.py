"""Turns two looks into the figures for the rules. Pure; a counter that fell was restarted in between."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from router.console.samples import Samples
from router.dashboard.doctor.engine_metrics import engine_figures
from router.dashboard.doctor.figures import DifferingShape, EngineFigures, Figures, ReplicaFigures, RouterFigures
from router.dashboard.doctor.looks import Chosen, Reading, ReplicaLook, RouterLook, replica_figures, router_figures
from router.responses import DecisionRecord, ReplicaStatus

ROUTER = "warmroute_router:"
GPU = "GPU"
COUNTERS = {  # the router's counters, by their fields of RoutingFigures
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
    replicas: dict[str, OfReplica | str]  # replicas by URL; the reason, if there is no answer


def figures_of(first: Look, between: Sequence[Samples], last: Look) -> Figures:
    known_urls = set() if last.router is None else {one.url.rstrip("/") for one in last.router.replicas}
    alone = [_alone(url, first.replicas.get(url), one) for url, one in last.replicas.items() if url not in known_urls]
    router, replicas, notes = None, [], []
    if first.router is not None and last.router is not None:
        readings = [first.router.metrics, *between, last.router.metrics]
        replicas = [_known(known, readings, first, last) for known in last.router.replicas]
        router = _router(first.router, last.router)
        if router.choices is None:
            notes.append("the router's decisions may not be read: herding was judged by queues alone; see --admin-key")
    for url, answer in last.replicas.items():
        if isinstance(answer, str):
            notes.append(f"{url}/metrics cannot be had ({answer}): that replica was judged by the router alone")
    window_s = max(last.at_s - first.at_s, 1e-3)
    return Figures(window_s=window_s, router=router, replicas=(*replicas, *alone), notes=tuple(notes))


# ---- a replica


def _alone(url: str, first: OfReplica | str | None, last: OfReplica | str) -> ReplicaFigures:
    """A replica that no router knows."""
    own, load = _own(first, last, None), last.load if isinstance(last, OfReplica) else None
    return ReplicaFigures(
        name=url.partition("://")[2],
        engine=own.engine if own else "",
        model=load.model if load else "",
        block_tokens=own.block_tokens if own else 0,
        own=own,
    )


def _known(known: ReplicaStatus, readings: Sequence[Samples], first: Look, last: Look) -> ReplicaFigures:
    url = known.url.rstrip("/")
    own = partial(_own, first.replicas.get(url), last.replicas.get(url), rank=known.rank)
    there = [one for one in readings if one.total(f"{ROUTER}replica_up", replica=known.name) is not None]
    before, now = _seen(known, readings[0]), _seen(known, readings[-1])
    return replica_figures(before, [_reading(known, one) for one in there], now, own)


def _seen(known: ReplicaStatus, metrics: Samples) -> ReplicaLook:
    name = known.name
    counted = {field: metrics.total(f"{ROUTER}{one}_total", replica=name) or 0.0 for field, one in COUNTERS.items()}
    counted["refused"] = metrics.total(f"{ROUTER}requests_total", replica=name, status="429") or 0.0
    return ReplicaLook(known, counted, metrics.total(f"{ROUTER}index_blocks", replica=name, medium=GPU) or 0.0)


def _reading(known: ReplicaStatus, metrics: Samples) -> Reading:
    def gauge(name: str) -> float:
        return metrics.total(f"{ROUTER}{name}", replica=known.name) or 0.0

    busy = max(gauge("replica_in_flight"), gauge("replica_running") + gauge("replica_waiting"))
    return Reading(busy, gauge("replica_queued_tokens"), int(gauge("event_lag_batches")))


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


def _router(first: OfRouter, last: OfRouter) -> RouterFigures:
    before = {one.request_id for one in first.decisions or ()}  # recognized by id, since clocks may differ
    new = [one for one in last.decisions or () if one.chosen is not None and one.request_id not in before]
    policy, chosen = new[0].policy if new else "", None if last.decisions is None else map(_chosen, new)
    figures = router_figures(policy, _counted(first.metrics), _counted(last.metrics), chosen)
    return replace(figures, differing=last.differing)


def _counted(metrics: Samples) -> RouterLook:
    requests, reasons = (
        metrics.total(f"{ROUTER}requests_total"),
        metrics.by(f"{ROUTER}approximate_prompts_total", "reason"),
    )
    return RouterLook(requests or 0.0, metrics.by(f"{ROUTER}refused_total", "code"), reasons)


def _chosen(one: DecisionRecord) -> Chosen:
    ours = sum(each.matched_tokens for each in one.candidates if each.name == one.chosen)
    others = [each.matched_tokens for each in one.candidates if each.name != one.chosen and each.cost_s is not None]
    return Chosen(one.ts - one.duration_s, one.chosen or "", one.prompt_tokens, ours, max(others, default=0))
