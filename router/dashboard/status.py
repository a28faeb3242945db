"""The router's view of its replicas, for people and for tools."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from router.core import Router
from router.dashboard.idle import why_idle
from router.members.members import Member
from router.placement.index import APPROXIMATE, PrefixIndex
from router.prompts.shapes import Shapes
from router.responses import FeedState, Index, Load, ReplicaStatus, Served

# Where a replica is, which process it is, and what its stream says; a client sees these values in their place.
FOR_ADMINISTRATORS: dict[str, Any] = {
    "url": "",
    "tokenizer": None,
    "isolation": None,
    "incarnation": None,
    "events": None,
}


def replica_statuses(router: Router, members: Sequence[Member]) -> list[ReplicaStatus]:
    idle = idle_members(router, members)
    return [status_of(router, member, idle.get(member.name)) for member in members]


def for_clients(status: ReplicaStatus) -> ReplicaStatus:
    """Leave out what is for administrators."""
    return msgspec.structs.replace(status, **FOR_ADMINISTRATORS)


def replica_status(router: Router, member: Member) -> ReplicaStatus:
    return replica_statuses(router, [member])[0]


def status_of(router: Router, member: Member, idle: str | None) -> ReplicaStatus:
    """`idle`: why it has nothing to do, as far as this worker knows."""
    candidate, spec, tallies = member.candidate, member.spec, member.tallies.values()
    feed = router.feeds.state(member.name)
    return ReplicaStatus(
        name=member.name,
        url=spec.url,
        engine=spec.engine,
        models=list(filter(member.serves, member.models)),
        available=candidate.unavailable is None,
        why=candidate.unavailable,
        state=state_of(member, feed),
        inexact=inexact(member, feed),
        trust=round(member.trust, 3),
        tokenizer=member.server.verified,
        isolation=router.isolation(member),
        block_size=member.block_size or None,
        max_model_len=spec.max_model_len,
        incarnation=member.incarnation,
        breaker=member.health.breaker,
        slowness=round(candidate.slowness, 3),
        load=Load(
            queued_tokens=round(candidate.queued_tokens),
            running=candidate.running,
            waiting=candidate.waiting,
            in_flight=candidate.in_flight,
            prefill_tokens_per_s=round(candidate.prefill_tokens_per_s, 1),
            empty_tokens=candidate.empty_tokens,
            total_blocks=member.load.total_blocks or None,
        ),
        index=Index(
            blocks_of(router, member, feed),
            round(member.accuracy.recent, 5),
            _index_of(router, feed).prompt_blocks(member.slot),
        ),
        events=feed,
        heard_age_s=member.health.heard_age_s(router.now_s()),
        served=Served(
            requests=sum(sum(tally.statuses.values()) for tally in tallies),
            prompt_tokens=sum(tally.prompt_tokens for tally in tallies),
            matched_tokens=sum(tally.matched_tokens for tally in tallies),
            generated_tokens=member.output.tokens,
            streamed_tokens=member.output.streamed_tokens,
            streaming_s=round(member.output.streaming_s, 6),
        ),
        rank=member.rank,
        role=member.spec.role,
        idle=idle,
        honesty=round(member.accuracy.honesty, 3),
        taken_names=member.taken_names,
    )


def idle_members(router: Router, members: Iterable[Member]) -> dict[str, str]:
    """Why members have nothing to do, by name, as far as this worker knows; nothing if it remembers no decisions."""
    if not router.config.decisions:
        return {}
    return why_idle(members, (past.decision for past in reversed(router.history.decisions)))


def state_of(member: Member, feed: FeedState | None) -> str:
    """`exact`, `partial` or `syncing` for a replica with followed events, else `approximate`."""
    if feed is None or member.block_size == APPROXIMATE:
        return "approximate"
    return "exact" if feed.exact else "partial" if feed.partial else "syncing"


def inexact(member: Member, feed: FeedState | None) -> str | None:
    """Why the index is not exact for the replica."""
    return member.why_no_events or None if feed is None else feed.reason


def blocks_of(router: Router, member: Member, feed: FeedState | None) -> dict[str, int]:
    return _index_of(router, feed).blocks(member.slot)


def _index_of(router: Router, feed: FeedState | None) -> PrefixIndex:
    return router.placement.guesses if feed is None else router.placement.index


def index_status(router: Router) -> dict[str, Any]:
    """The size of everything that could grow."""
    return {
        "replicas": {one.name: blocks_of(router, one, router.feeds.state(one.name)) for one in router.members},
        "bytes": router.placement.index.bytes_used(),
        "optimistic_entries": len(router.placement.index.optimistic),
        "recent_prompts": len(router.history.recent),
        "approximate_bytes": router.placement.guesses.bytes_used(),
        "models": {
            name: {
                "replicas": [member.name for member in model.members],
                "block_sizes": sorted(model.slots),
                "tokenizer": model.tokens.why_not or "exact",
                "message_cache": model.tokens.why_no_cache or "on",
                "shapes": None if (shapes := model.tokens.shapes) is None else shapes_status(shapes),
            }
            for name, model in router.members.models.items()
        },
    }


def shapes_status(shapes: Shapes) -> dict[str, Any]:
    """The shapes of requests whose prompts are known to be the engine's, and those that are not."""
    return {
        "verified": sum(1 for name in shapes.known if shapes.is_exact(name)),
        "known": len(shapes.known),
        "why_not": shapes.silent,
        "differing": [
            {"shape": name, "replica": one.replica, "token": one.position, "here": one.ours, "there": one.theirs}
            for name, one in shapes.differences()
        ],
    }


def not_ready(router: Router, *, all_of_them: bool = False) -> str | None:
    """The reason why load balancers should wait, if there is one. At the start, this includes caches still being read.

    Later it does not: one replica with unreachable events would take all routers away from clients.
    """
    members = [member for member in router.members if member.spec.role != "prefill"]
    waits = bool(router.members.expected)  # a Service sends it nothing while it is not ready
    if not members and not waits:
        return "no replica that generates is known yet" if len(router.members) else "no replica is known yet"
    if router.awaits_rewrites:
        return "the model rewrites have not been read yet"
    down = {member.name: why for member in members if (why := member.candidate.unavailable) is not None}
    up = [one for one in members if one.name not in down]
    if router.now_s() < router.index_awaited_until_s:
        unheard = [one.name for one in members if not (one.server.learned or one.server.trouble)]
        syncing = [one.name for one in up if state_of(one, router.feeds.state(one.name)) == "syncing"]
        if unheard or syncing:
            awaited = ", ".join([*unheard, *syncing])
            return f"the index is not complete: what {awaited} holds is still being read"
    if (len(down) == len(members) and not waits) or (down and all_of_them):
        return f"no requests are taken by {'; '.join(f'{name} ({why})' for name, why in down.items())}"
    return None
