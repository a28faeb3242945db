"""Asks a replica about itself: its engine, models, ranks and event sockets."""

from collections.abc import Awaitable, Callable

import msgspec

from router.members.facts import Facts, foreign_facts, native_facts
from router.members.fetch import Fetched
from router.members.ranks import NAME_THEM, Sources, ranks_of, sglang_sources, vllm_sources
from router.members.spec import BadSpec, ReplicaSpec

Ask = Callable[[str], Awaitable[Fetched]]


async def learn(spec: ReplicaSpec, ask: Ask, before: Facts | None = None) -> Facts:
    """Ask for all that the replica tells; `ask` raises Broken. Raise BadSpec if the answers cannot be used.

    `before`: what it told last. An engine that cannot tell its sockets this time still has the same.
    """
    if spec.engine in ("auto", "warmroute"):
        answer = await ask("/load")
        facts = native_facts(spec, answer.body) if answer.status == 200 else None
        if facts is not None:
            return facts
        if spec.engine == "warmroute":
            raise BadSpec(f"{spec.name} does not answer /load as a replica of ours (status {answer.status})")
    answer = await ask("/v1/models")
    if answer.status != 200:
        raise BadSpec(f"{spec.name} answers /v1/models with status {answer.status}")
    facts = foreign_facts(spec, answer.body)
    sources = await _sources(facts.spec, ask)
    known = before.ranks if before is not None and sources.failed else ranks_of(facts.spec, sources)
    return msgspec.structs.replace(facts, ranks=known)


async def _sources(spec: ReplicaSpec, ask: Ask) -> Sources:
    if spec.engine == "vllm":
        answer = await ask("/kv_event_sources")
        sources = vllm_sources(answer.status, answer.body)
        if not sources.publishers:
            sources = vllm_sources(answer.status, answer.body, (await ask("/metrics")).body)
        return sources
    if spec.engine == "sglang":
        answer = await ask("/server_info")
        return sglang_sources(answer.status, answer.body)
    return Sources(why_not=f"its engine does not tell event sockets; if it has some, {NAME_THEM}")
