"""Figures for the rules from two looks at a router and its replicas, and readings in between. Pure.

A counter that fell was reset in between, and counts as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict

from router.dashboard.doctor.figures import DecisionSample, EngineFigures, ReplicaFigures, RouterFigures, RoutingFigures
from router.responses import ReplicaStatus

FEW_READINGS = 2  # a lag may be momentary if there are fewer
GPU = "GPU"
OF_STREAM = ("lost_batches", "gaps", "repairs", "digest_mismatches", "restarts")
SAID = ("available", "why", "breaker", "state", "inexact", "trust", "honesty", "taken_names")


class Reading(NamedTuple):
    busy: float
    queued_tokens: float
    lag_batches: int


def reading(one: ReplicaStatus) -> Reading:
    busy = max(one.load.in_flight, one.load.running + one.load.waiting)
    return Reading(busy, one.load.queued_tokens, 0 if one.events is None else one.events.lag_batches)


def counted(status: ReplicaStatus) -> dict[str, float]:
    """Its counters by their fields of RoutingFigures."""
    events = {} if status.events is None else {name: getattr(status.events, name) for name in OF_STREAM}
    return {"faults": status.faults, **asdict(status.served), **events}


class RouterLook(NamedTuple):
    """The router at one moment."""

    requests: float
    refused: Mapping[str, float]
    approximate: Mapping[str, float]


def grown(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    then = {name: before.get(name, 0.0) for name in now}
    return {name: count - then[name] if count >= then[name] else count for name, count in now.items()}


def replica_figures(
    first: ReplicaStatus | None,
    readings: Sequence[Reading],
    status: ReplicaStatus,
    own_figures: Callable[[tuple[float, float] | None], EngineFigures | None],
) -> ReplicaFigures:
    """Its figures since `first`, which is None if it has come since.

    `own_figures`: what its own /metrics say, given its blocks in the router's index and their increase.
    """
    events, before = status.events, {} if first is None else counted(first)
    blocks, blocks_before = (0 if one is None else one.index.blocks.get(GPU, 0) for one in (status, first))
    own = own_figures(None if events is None else (blocks, blocks - blocks_before))
    told: dict[str, Any] = {name: getattr(status, name) for name in SAID} | grown(before, counted(status))
    if events is not None:
        told |= {"overclaim": events.overclaim, "unknown": events.unknown}
    routed = RoutingFigures(
        **told,
        has_events=events is not None and not events.unreached,
        predictions_ever=status.served.predictions,
        lag_batches=min(one.lag_batches for one in readings) if len(readings) >= FEW_READINGS else 0,
        index_blocks=blocks,
        prefill_tokens_per_s=status.load.prefill_tokens_per_s,
        busy=tuple(one.busy for one in readings),
        queued_tokens=tuple(one.queued_tokens for one in readings),
    )
    return ReplicaFigures(
        name=status.name,
        engine=status.engine,
        model=status.models[0] if status.models else "",
        block_tokens=(own.block_tokens if own else 0) or status.block_size or 0,
        own=own,
        routed=routed,
    )


def router_figures(
    policy: str, first: RouterLook, last: RouterLook, choices: Sequence[tuple[float, str, bool]] | None
) -> RouterFigures:
    """`choices`: as in a DecisionSample; None if the decisions may not be read."""
    [requests] = grown({"": first.requests}, {"": last.requests}).values()
    return RouterFigures(
        policy=policy,
        requests=requests,
        refused={code: count for code, count in grown(first.refused, last.refused).items() if count},
        approximate={why: count for why, count in grown(first.approximate, last.approximate).items() if count},
        choices=None if choices is None else tuple(DecisionSample(*one) for one in choices),
    )
