"""Asks a replica about itself: its engine, models, ranks and event sockets."""

import msgspec

from engines import profile_of
from engines.sources import Ask
from router.members.facts import Facts, foreign_facts, native_facts
from router.members.ranks import ranks_of
from router.members.spec import AUTO, BadSpec, ReplicaSpec


async def learn(spec: ReplicaSpec, ask: Ask, before: Facts | None = None) -> Facts:
    """Ask for all that the replica tells; `ask` raises Broken. Raise BadSpec if the answers cannot be used.

    `before`: what it told last. An engine that cannot tell its sockets this time still has the same.
    """
    is_ours = profile_of(spec.engine).describes_itself
    if is_ours or spec.engine == AUTO:
        answer = await ask("/load")
        facts = native_facts(spec, answer.body) if answer.status == 200 else None
        if facts is not None:
            return facts
        if is_ours:
            raise BadSpec(f"{spec.name} does not answer /load as a replica of ours (status {answer.status})")
    answer = await ask("/v1/models")
    if answer.status != 200:
        raise BadSpec(f"{spec.name} answers /v1/models with status {answer.status}")
    facts = foreign_facts(spec, answer.body)
    sources = await facts.profile.sources(ask)
    known = before.ranks if before is not None and sources.failed else ranks_of(facts.spec, sources)
    return msgspec.structs.replace(facts, ranks=known)
