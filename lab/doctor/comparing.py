"""Turns two looks into the figures for the rules. Pure; a counter that fell was restarted in between."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from router.console.samples import Samples
from router.dashboard.doctor.engine_metrics import engine_figures
from router.dashboard.doctor.figures import DifferingShape, EngineFigures, Figures, ReplicaFigures, RouterFigures
from router.dashboard.doctor.looks import RouterLook, reading, replica_figures, router_figures
from router.responses import DecisionRecord, ReplicaStatus

ROUTER = "warmroute_router:"


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


def figures_of(first: Look, between: Sequence[Sequence[ReplicaStatus]], last: Look) -> Figures:
    known_urls = set() if last.router is None else {one.url.rstrip("/") for one in last.router.replicas}
    router, replicas, notes = None, [], []
    if first.router is not None and last.router is not None:
        before, *later = (
            {one.name: one for one in replicas} for replicas in (first.router.replicas, *between, last.router.replicas)
        )
        for one in last.router.replicas:
            url = one.url.rstrip("/")
            own_figures = partial(_own, first.replicas.get(url), last.replicas.get(url), rank=one.rank)
            readings = [reading(there[one.name]) for there in (before, *later) if one.name in there]
            replicas.append(replica_figures(before.get(one.name), readings, one, own_figures))
        router = _router(first.router, last.router)
        if router.choices is None:
            notes.append("the router's decisions may not be read: herding was judged by queues alone; see --admin-key")
    for url, answer in last.replicas.items():
        if isinstance(answer, str):
            notes.append(f"{url}/metrics cannot be had ({answer}): that replica was judged by the router alone")
        if url not in known_urls:
            own, load = _own(first.replicas.get(url), answer, None), None if isinstance(answer, str) else answer.load
            alone = ReplicaFigures(
                name=url.partition("://")[2],
                engine=own.engine if own else "",
                model=load.model if load else "",
                block_tokens=own.block_tokens if own else 0,
                own=own,
            )
            replicas.append(alone)
    window_s = max(last.at_s - first.at_s, 1e-3)
    return Figures(window_s=window_s, router=router, replicas=tuple(replicas), notes=tuple(notes))


# ---- a replica


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
    def counted(there: OfRouter) -> RouterLook:
        requests, metrics = sum(one.served.requests for one in there.replicas), there.metrics
        refused = metrics.by(f"{ROUTER}refused_total", "code")
        return RouterLook(requests, refused, metrics.by(f"{ROUTER}approximate_prompts_total", "reason"))

    before = {one.request_id for one in first.decisions or ()}  # recognized by id, since clocks may differ
    chosen, policy = [], ""
    for one in last.decisions or ():
        if one.chosen is None or one.request_id in before:
            continue
        policy = policy or one.policy
        ours = sum(each.matched_tokens for each in one.candidates if each.name == one.chosen)
        others = [each.matched_tokens for each in one.candidates if each.name != one.chosen and each.cost_s is not None]
        chosen.append((one.ts - one.duration_s, one.chosen, ours > max(others, default=0)))
    known = None if last.decisions is None else chosen
    return replace(router_figures(policy, counted(first), counted(last), known), differing=last.differing)
