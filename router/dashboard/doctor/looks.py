"""Figures for the rules from two looks at a router and its replicas, and readings in between. Pure.

A counter that fell was reset in between, and counts as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from router.dashboard.doctor.figures import DecisionSample, EngineFigures, ReplicaFigures, RouterFigures, RoutingFigures
from router.responses import ReplicaStatus

FEW_READINGS = 2  # a lag may be momentary if there are fewer
GPU = "GPU"
SAID = ("available", "why", "breaker", "state", "inexact", "trust", "honesty", "taken_names")


class ReplicaLook(NamedTuple):
    """One replica at one moment, as the router knows it."""

    status: ReplicaStatus
    counted: Mapping[str, float]  # counters by their fields of RoutingFigures
    index_blocks: float


class Reading(NamedTuple):
    busy: float
    queued_tokens: float
    lag_batches: int


class RouterLook(NamedTuple):
    """The router at one moment."""

    requests: float
    refused: Mapping[str, float]
    approximate: Mapping[str, float]


def decision_sample(at_s: float, replica: str, prompt_tokens: float, ours: float, others: float) -> DecisionSample:
    """`ours`: tokens of its prompt that the chosen replica held; `others`: those at the best of the others."""
    missed = max(0.0, others - ours)
    return DecisionSample(
        at_s=at_s, replica=replica, cached=ours > others, prompt_tokens=prompt_tokens, missed_tokens=missed
    )


def grown(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    then = {name: before.get(name, 0.0) for name in now}
    return {name: count - then[name] if count >= then[name] else count for name, count in now.items()}


def replica_figures(
    first: ReplicaLook,
    readings: Sequence[Reading],
    last: ReplicaLook,
    own_figures: Callable[[tuple[float, float] | None], EngineFigures | None],
) -> ReplicaFigures:
    """`own_figures`: what its own /metrics say, given its blocks in the router's index and their increase."""
    status, events = last.status, last.status.events
    own = own_figures(None if events is None else (last.index_blocks, last.index_blocks - first.index_blocks))
    told: dict[str, Any] = {name: getattr(status, name) for name in SAID} | grown(first.counted, last.counted)
    if events is not None:
        told |= {"overclaim": events.overclaim, "unknown": events.unknown}
    routed = RoutingFigures(
        **told,
        has_events=events is not None and not events.unreached,
        predictions_ever=last.counted.get("predictions", 0.0),
        lag_batches=min(one.lag_batches for one in readings) if len(readings) >= FEW_READINGS else 0,
        index_blocks=last.index_blocks,
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
    policy: str, first: RouterLook, last: RouterLook, choices: Sequence[DecisionSample] | None
) -> RouterFigures:
    """`choices`: None if the decisions may not be read."""
    [requests] = grown({"": first.requests}, {"": last.requests}).values()
    return RouterFigures(
        policy=policy,
        requests=requests,
        refused={code: count for code, count in grown(first.refused, last.refused).items() if count},
        approximate={why: count for why, count in grown(first.approximate, last.approximate).items() if count},
        missed_tokens=sum(one.missed_tokens for one in choices or ()),
        chosen_tokens=sum(one.prompt_tokens for one in choices or ()),
        choices=None if choices is None else tuple(choices),
    )
