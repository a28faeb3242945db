"""The dashboard's page of one replica."""

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from router.dashboard.sampling import EVERY_S, REPLICA_POINTS, REPLICA_SERIES, Sampling, Series
from router.dashboard.sharing import KeySpace, SharedPrefixes, Told, text_of
from router.dashboard.status import for_clients
from router.members.counts import ReplicaCounts
from router.members.feed import Traffic
from router.members.members import Member
from router.placement.index import APPROXIMATE
from router.prompts.prefixes.tree import Run
from router.responses import FeedState

MAX_PREFIXES = 50


class HeldPrefix(Struct):
    """A prefix of recent prompts, and how much of it this replica holds."""

    model: str
    exact: bool
    tokens: int
    held_tokens: int
    held: bool
    prompts: int
    idle_s: float
    held_by: int
    text: str | None  # its beginning
    adds: str | None  # text that it adds to its parent prefix


def page_of(member: Member, sampling: Sampling, prefixes: list[HeldPrefix] | None, policy: str) -> dict[str, Any]:
    """The page; `prefixes` is None for readers, who may not see prompts."""
    statuses = sampling.statuses
    replica, traffic = statuses.one(member), statuses.feeds.traffic(member.name)
    feed = replica.events
    row, recent = sampling.row(member, replica)
    sampled, done = sampling.sampled(member), sampling.counts(member)
    series = Series(REPLICA_SERIES, REPLICA_POINTS) if sampled is None else sampled.series
    kept, ages = member.candidate.ages, None  # tokens by the time since their last use; other policies do not track it
    if kept is not None and kept.capacity_pages and policy == "cost":
        ages = [{"idle_s": round(idle_s, 1), "tokens": tokens} for idle_s, tokens in kept.held(statuses.now_s())]
    return {
        "replica": for_clients(replica) if prefixes is None else replica,
        "row": row,
        "stream": None if feed is None or traffic is None else _stream(feed, traffic, recent, sampling.over_s()),
        "cache": {
            "blocks": replica.index.blocks,
            "block_size": replica.block_size,
            "empty_tokens": None if replica.load.empty_tokens is None else round(replica.load.empty_tokens),
            "total_blocks": replica.load.total_blocks,
            "ages": ages,
            "prefixes": prefixes,
        },
        "counts": {
            **{name: getattr(done, name) for name in ("requests", "errors", "prompt_tokens", "matched_tokens")},
            "predictions": member.accuracy.compared,
            "wrong_predictions": member.accuracy.different,
            "resyncs": member.resyncs,
            "faults": member.server.faults,
        },
        "history": {"interval_s": EVERY_S, **series.columns()},
    }


def _stream(feed: FeedState, traffic: Traffic, recent: ReplicaCounts, over_s: float) -> dict[str, Any]:
    age_s = feed.last_event_age_s
    return {
        **asdict(feed),
        "batches": traffic.batches,
        "stored_blocks": traffic.stored,
        "removed_blocks": traffic.removed,
        "batches_per_s": round(recent.batches / over_s, 3),
        "stored_per_s": round(recent.stored_blocks / over_s, 3),
        "removed_per_s": round(recent.removed_blocks / over_s, 3),
        "digest_checks": traffic.digests_compared,
        "last_event_age_s": None if age_s is None else round(age_s, 3),
    }


# ---- shared prefixes


async def held_prefixes(shared: SharedPrefixes, member: Member, told: Told) -> list[HeldPrefix]:
    """The shared prefixes of the member's models, the largest saving first.

    Empty if the member leaves meanwhile: its slot may be reused.
    """
    found = []
    for run in told.runs[:MAX_PREFIXES]:
        await asyncio.sleep(0)
        if member not in shared.members:
            return []
        path = run.path()
        kind = told.kinds[path[0]]
        if member.serves(kind.model) and (kind.block_size == APPROXIMATE) == (member.block_size == APPROXIMATE):
            found.append(_held(shared, member, kind, path))
    return sorted(found, key=lambda one: one.held_tokens * one.prompts, reverse=True)


def _held(shared: SharedPrefixes, member: Member, kind: KeySpace, path: Sequence[Run]) -> HeldPrefix:
    prefix, usable = shared.prefix_of(kind, path)
    blocks, all_blocks = usable.get(member.slot, 0), sum(len(each.keys) for each in path)
    return HeldPrefix(
        model=prefix.model,
        exact=prefix.exact,
        tokens=all_blocks * kind.block_tokens,
        held_tokens=blocks * kind.block_tokens,
        held=shared.is_held(kind, all_blocks, member, blocks),
        prompts=prefix.prompts,
        idle_s=prefix.idle_s,
        held_by=prefix.held_by,
        text=text_of(path[-1:]),
        adds=prefix.text if len(path) > 1 else None,
    )
