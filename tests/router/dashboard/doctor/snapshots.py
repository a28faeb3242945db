"""A healthy fleet as the rules see it, and ways to make one thing of it worse."""

from typing import Any

from msgspec.structs import replace

from router.dashboard.doctor.figures import (
    DecisionSample,
    EngineFigures,
    Figures,
    ReplicaFigures,
    RouterFigures,
    RoutingFigures,
)

READINGS = 21
WINDOW_S = 10.0

OWN = EngineFigures(
    block_tokens=16,
    total_blocks=1000,
    usage=0.4,
    full=1.0,
    evicted_blocks=50.0,
    query_tokens=100_000.0,
    hit_tokens=80_000.0,
    query_blocks=6_100.0,
    prompts=100.0,
    prompt_tokens=100_000.0,
    preemptions=0.0,
    cached_blocks=900.0,
    prompt_tokens_ever=1e6,
    hit_tokens_ever=8e5,
    events_ever=1e4,
    sends_events=True,
)
ROUTED = RoutingFigures(
    predictions=100,
    wrong_predictions=1,
    wrong_blocks=3,
    requests=100,
    prompt_tokens=100_000,
    matched_tokens=80_000,
    evicted_tokens=1_000,
    new_tokens=19_000,
    reported_blocks=5000,
    index_blocks=900.0,
    busy=(4.0,) * READINGS,
    queued_tokens=(500.0,) * READINGS,
)


def choices(pattern: str, *, each: int = 1, every_s: float = 0.05, cached: bool = False) -> tuple[DecisionSample, ...]:
    """One letter, or `each` of it, after the other."""
    names = [f"r{'abc'.index(letter)}" for letter in pattern for _ in range(each)]
    return tuple(
        DecisionSample(at_s=number * every_s, replica=name, cached=cached) for number, name in enumerate(names)
    )


ROUTER = RouterFigures(policy="cost", requests=300.0, choices=choices("abc" * 60))


def replica(name: str = "r0", own: dict[str, Any] | None = None, **routed: Any) -> ReplicaFigures:
    return ReplicaFigures(
        name=name,
        model="m",
        block_tokens=16,
        own=replace(OWN, **(own or {})),
        routed=replace(ROUTED, **routed),
    )


def fleet(first: ReplicaFigures | None = None, *, router: RouterFigures = ROUTER, **others: Any) -> Figures:
    """Three replicas; the first one as given."""
    rest = (replica("r1", **others), replica("r2", **others))
    return Figures(window_s=WINDOW_S, router=router, replicas=(first or replica(), *rest))


def worse(own: dict[str, Any] | None = None, **routed: Any) -> Figures:
    """With one replica that differs."""
    return fleet(replica("r0", own, **routed))


def routed_worse(**fields: Any) -> Figures:
    return fleet(router=replace(ROUTER, **fields))


def all_worse(**routed: Any) -> Figures:
    return fleet(replica("r0", **routed), **routed)
