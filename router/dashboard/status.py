"""The router's view of its replicas, for people and for tools."""

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from router.dashboard.idle import why_idle
from router.dashboard.rows import Fleet, Totals
from router.dashboard.sampling import Sampling, paused, rates
from router.members.counts import ReplicaCounts
from router.members.members import Member, Members
from router.placement.index import PrefixIndex
from router.placement.placement import Placement
from router.placement.prices import GPU
from router.prompts.shapes import Shapes
from router.proxy.request_summary import PastDecision
from router.responses import CAUSES, STANDINGS, FeedState, Index, Load, PromptCounts, Recent, ReplicaStatus, Served
from router.tenants.admission import Admission

DRAINS = "it drains"  # the router's reason for a replica that reports draining
LAGGING_BATCHES = 8  # a few are always in flight
SUMS = ("in_flight", "running", "waiting", "queued_tokens")
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


@dataclass(eq=False)
class Statuses:
    """Says how replicas are, as far as this worker knows; their rates are those of all workers."""

    members: Members
    placement: Placement
    admission: Admission
    decisions: deque[PastDecision]
    sampling: Sampling

    def one(self, member: Member) -> ReplicaStatus:
        return self._of(member, self.sampling.recently(member), self._idle([member]).get(member.name))

    async def all(self, total: ReplicaCounts | None = None) -> list[ReplicaStatus]:
        """The status of each replica, made with pauses for requests; `total` gets what all have done recently."""
        await self.sampling.others.look()
        idle, found = self._idle(self.members), []
        async for member in paused(list(self.members)):
            if member in self.members:  # it may have left during a pause
                recent = self.sampling.recently(member)
                if total is not None:
                    total.add(recent)
                found.append(self._of(member, recent, idle.get(member.name)))
        return found

    async def fleet(self) -> Fleet:
        recent, sampling = ReplicaCounts(), self.sampling
        replicas = await self.all(recent)
        standings = Counter(one.standing for one in replicas)
        unserved = sampling.unserved() - sampling.unserved_before
        totals = Totals(
            replicas=len(replicas),
            up=sum(one.available for one in replicas),
            waiting_here=sampling.waiting(),
            blocks=sum(sum(one.index.blocks.values()) for one in replicas),
            index_bytes=self.placement.index.bytes_used(),
            saved_tokens=sampling.past.cached_tokens,
            saved_s=round(sampling.past.saved_s, 3),
            computed={cause[:-7]: getattr(sampling.past, cause) for cause in CAUSES},
            **{name: sum(getattr(one.load, name) for one in replicas) for name in SUMS},
            **rates(recent, sampling.over_s(), (50, 90, 99), errors=unserved),
        )
        states = {standing: standings[standing] for standing in STANDINGS}
        return Fleet(round(time.time(), 3), sampling.now_s(), totals, states, replicas)

    def _idle(self, members: Iterable[Member]) -> dict[str, str]:
        """Why members have nothing to do, by name; nothing if no decisions are remembered."""
        if not self.decisions.maxlen:
            return {}
        return why_idle(members, (past.decision for past in reversed(self.decisions)))

    def _of(self, member: Member, recent: ReplicaCounts, idle: str | None) -> ReplicaStatus:
        """`idle`: why it has nothing to do."""
        candidate, spec, health, tallies = member.candidate, member.spec, member.health, member.tallies.values()
        feed, sampling = member.feed_state, self.sampling
        index, in_flight, over_s = self.index_of(feed), sampling.in_flight(member), sampling.over_s()
        isolation = ("by salt" if member.profile.separates_salts else "unknown") if self.admission.has_salts else None
        standing = state = member.index_state(feed)
        if candidate.unavailable is not None:
            standing = "draining" if health.draining or health.resting == DRAINS else "down"
        elif state != "syncing" and feed is not None and feed.lag_batches >= LAGGING_BATCHES:
            standing = "lagging"
        severity = int(standing not in ("approximate", "exact") or health.breaker != "closed" or recent.errors > 0)
        blocks, all_blocks, cache_used = index.blocks(member.slot), member.load.total_blocks, None
        if all_blocks:
            used = blocks.get(GPU, 0) / all_blocks
            if candidate.empty_tokens is not None and member.block_size:
                used = 1 - candidate.empty_tokens / (all_blocks * member.block_size)
            cache_used = round(min(1.0, max(0.0, used)), 4)
        heard_age_s = health.heard_age_s(sampling.now_s())
        if heard_age_s is None and feed is not None:
            heard_age_s = feed.last_event_age_s
        return ReplicaStatus(
            name=member.name,
            url=spec.url,
            engine=spec.engine,
            models=list(filter(member.serves, member.models)),
            available=candidate.unavailable is None,
            why=candidate.unavailable,
            state=state,
            inexact=member.why_no_events or None if feed is None else feed.reason,
            trust=round(member.trust, 3),
            tokenizer=member.server.verified,
            isolation=isolation,
            block_size=member.block_size or None,
            max_model_len=spec.max_model_len,
            incarnation=member.incarnation,
            breaker=health.breaker,
            slowness=round(candidate.slowness, 3),
            load=Load(
                queued_tokens=round(candidate.queued_tokens),
                running=candidate.running,
                waiting=candidate.waiting,
                in_flight=in_flight,
                prefill_tokens_per_s=round(candidate.prefill_tokens_per_s, 1),
                empty_tokens=candidate.empty_tokens,
                total_blocks=all_blocks or None,
            ),
            index=Index(
                blocks,
                round(member.accuracy.recent, 5),
                index.prompt_blocks(member.slot),
            ),
            events=feed,
            heard_age_s=None if heard_age_s is None else round(heard_age_s, 3),
            served=Served(
                requests=sum(sum(tally.statuses.values()) for tally in tallies),
                refused=sum(tally.statuses.get(429, 0) for tally in tallies),
                generated_tokens=member.output.tokens,
                streamed_tokens=member.output.streamed_tokens,
                streaming_s=round(member.output.streaming_s, 6),
                predictions=member.accuracy.compared,
                wrong_predictions=member.accuracy.different,
                wrong_blocks=member.accuracy.error_blocks,
                resyncs=member.resyncs,
                **{name: sum(getattr(tally, name) for tally in tallies) for name in PromptCounts.__struct_fields__},
            ),
            rank=member.rank,
            role=spec.role,
            idle=None if recent.requests or in_flight else idle,
            honesty=round(member.accuracy.honesty, 3),
            taken_names=member.taken_names,
            standing=standing,
            severity=2 if standing == "down" or health.breaker == "open" else severity,
            faults=member.server.faults,
            cache_used=cache_used,
            recent=Recent(**rates(recent, over_s), batches_per_s=round(recent.batches / over_s, 3)),
        )

    def index_of(self, feed: FeedState | None) -> PrefixIndex:
        """The index that has the blocks of a replica with this stream; without one, they are guessed."""
        return self.placement.guesses if feed is None else self.placement.index

    def sizes(self, recent_prompts: int) -> dict[str, Any]:
        """The size of everything that could grow."""
        return {
            "replicas": {one.name: self.index_of(one.feed_state).blocks(one.slot) for one in self.members},
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
