"""The router's view of its replicas, for people and for tools."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from router.dashboard.idle import why_idle
from router.members.feeds import Feeds
from router.members.members import Member, Members
from router.placement.index import PrefixIndex
from router.placement.placement import Placement
from router.prompts.shapes import Shapes
from router.proxy.request_summary import PastDecision
from router.responses import FeedState, Index, Load, ReplicaStatus, Served
from router.tenants.admission import Admission

# The place of a replica, its process and its stream; a client sees these values in their place.
FOR_ADMINISTRATORS: dict[str, Any] = {
    "url": "",
    "tokenizer": None,
    "isolation": None,
    "incarnation": None,
    "events": None,
}


def for_clients(status: ReplicaStatus) -> ReplicaStatus:
    """Leave out what is for administrators."""
    return msgspec.structs.replace(status, **FOR_ADMINISTRATORS)


class Statuses(NamedTuple):
    """Says how replicas are, as far as this worker knows."""

    members: Members
    feeds: Feeds
    placement: Placement
    admission: Admission
    decisions: deque[PastDecision]
    now_s: Callable[[], float]

    def all(self, members: Sequence[Member]) -> list[ReplicaStatus]:
        idle = self.idle(members)
        return [self.of(member, idle.get(member.name)) for member in members]

    def one(self, member: Member) -> ReplicaStatus:
        return self.all([member])[0]

    def idle(self, members: Iterable[Member]) -> dict[str, str]:
        """Why members have nothing to do, by name; nothing if no decisions are remembered."""
        if not self.decisions.maxlen:
            return {}
        return why_idle(members, (past.decision for past in reversed(self.decisions)))

    def of(self, member: Member, idle: str | None) -> ReplicaStatus:
        """`idle`: why it has nothing to do."""
        candidate, spec, tallies = member.candidate, member.spec, member.tallies.values()
        feed = self.feeds.state(member.name)
        index = self.index_of(feed)
        isolation = ("by salt" if member.profile.separates_salts else "unknown") if self.admission.has_salts else None
        return ReplicaStatus(
            name=member.name,
            url=spec.url,
            engine=spec.engine,
            models=list(filter(member.serves, member.models)),
            available=candidate.unavailable is None,
            why=candidate.unavailable,
            state=member.index_state(feed),
            inexact=member.why_no_events or None if feed is None else feed.reason,
            trust=round(member.trust, 3),
            tokenizer=member.server.verified,
            isolation=isolation,
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
                index.blocks(member.slot),
                round(member.accuracy.recent, 5),
                index.prompt_blocks(member.slot),
            ),
            events=feed,
            heard_age_s=member.health.heard_age_s(self.now_s()),
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

    def index_of(self, feed: FeedState | None) -> PrefixIndex:
        """The index that has the blocks of a replica with this stream; without one, they are guessed."""
        return self.placement.guesses if feed is None else self.placement.index

    def sizes(self, recent_prompts: int) -> dict[str, Any]:
        """The size of everything that could grow."""
        return {
            "replicas": {one.name: self.index_of(self.feeds.state(one.name)).blocks(one.slot) for one in self.members},
            "bytes": self.placement.index.bytes_used(),
            "optimistic_entries": len(self.placement.index.optimistic),
            "recent_prompts": recent_prompts,
            "approximate_bytes": self.placement.guesses.bytes_used(),
            "models": {
                name: {
                    "replicas": [member.name for member in model.members],
                    "block_sizes": sorted(model.slots),
                    "tokenizer": model.tokens.why_not or "exact",
                    "message_cache": model.tokens.why_no_cache or "on",
                    "shapes": None if (shapes := model.tokens.shapes) is None else shapes_status(shapes),
                }
                for name, model in self.members.models.items()
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
