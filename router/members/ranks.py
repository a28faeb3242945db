"""The caches behind one URL and the event sockets of each, from an engine's own answers. Pure.

An answer may come from a broken or hostile machine: it is bounded, and only sockets of the replica's own host are
followed. Each sentence for a user ends with what to change.
"""

from contextlib import suppress

import msgspec
from msgspec import Struct

from engines import profile_of
from engines.sources import NAME_THEM, NO_EVENTS, SWITCH_ON, Sources
from events.publisher import offset_port
from events.source import Source
from router.members.spec import LOOPBACK, OFF, TCP, WILDCARDS, BadSpec, ReplicaSpec

OWN_URLS = "give each rank a URL of its own"


class Rank(Struct, frozen=True):
    """One cache: its completed spec, which has the rank's name, and its place in the engine."""

    spec: ReplicaSpec
    number: int | None = None  # as events and metrics count; None: there is only one
    header: bytes = b""  # a line that steers a request there
    why_no_events: str = ""


def ranks_of(spec: ReplicaSpec, sources: Sources) -> tuple[Rank, ...]:
    """The caches of a replica. Sockets in the spec win; they are those of rank 0, and the others follow as ports."""
    numbers = list(sources.publishers)
    if len(numbers) < 2:
        return (_rank(spec, spec.name, numbers[0] if numbers else 0, sources, typed_offset=0),)
    steered_by = profile_of(spec.engine).rank_header
    if not (sources.steered and steered_by):
        why = f"its {len(numbers)} data-parallel ranks cannot be chosen by this version of the engine: {OWN_URLS}"
        return (Rank(msgspec.structs.replace(spec, events=OFF, replay=None), why_no_events=why),)
    ranks = []
    for place, number in enumerate(numbers):
        rank = _rank(spec, f"{spec.name}@dp{number}", number, sources, typed_offset=number)
        # The header counts the ranks behind this URL, of which the first may not be the engine's first.
        header = f"{steered_by}: {place}\r\n".encode()
        ranks.append(msgspec.structs.replace(rank, number=number, header=header))
    return tuple(ranks)


def _rank(spec: ReplicaSpec, name: str, number: int, sources: Sources, typed_offset: int) -> Rank:
    named = msgspec.structs.replace(spec, name=name)
    if spec.events == OFF:
        return Rank(named)
    if spec.events is not None:
        replay = None if spec.replay is None else offset_port(spec.replay, typed_offset)
        return Rank(msgspec.structs.replace(named, events=offset_port(spec.events, typed_offset), replay=replay))
    try:
        events, replay, topic = _found(spec, sources, number)
        Source(name, events, replay).check()
    except ValueError as error:
        return Rank(msgspec.structs.replace(named, events=OFF, replay=None), why_no_events=str(error))
    return Rank(msgspec.structs.replace(named, events=events, replay=replay, topic=topic))


def _found(spec: ReplicaSpec, sources: Sources, number: int) -> tuple[str, str | None, str]:
    """A rank's sockets and topic by the engine's word; raise BadSpec with the reason if they cannot be followed."""
    publisher = sources.publishers.get(number)
    if publisher is None:
        raise BadSpec(sources.why_not)
    if not publisher.enable_kv_cache_events or publisher.publisher != "zmq" or not publisher.endpoint:
        raise BadSpec(NO_EVENTS)
    replay = None
    with suppress(BadSpec):  # the stream itself can be followed; its state says what is missing
        replay = publisher.replay_endpoint and reachable(spec, publisher.replay_endpoint, binds_all=True)
    return reachable(spec, publisher.endpoint), replay, spec.topic or publisher.topic


def reachable(spec: ReplicaSpec, endpoint: str, *, binds_all: bool = False) -> str:
    """The endpoint as seen from here; raise BadSpec if it is not on the replica's own host.

    vLLM binds an endpoint with a star, and connects to any other one. `binds_all`: this socket is always bound.
    """
    host = spec.target.host
    tcp = TCP.fullmatch(endpoint)
    if tcp is None:
        if endpoint.startswith("ipc://") and LOOPBACK.fullmatch(host):
            return endpoint
        raise BadSpec(f"its event socket {endpoint[:100]!r} cannot be reached from here: {SWITCH_ON}")
    found, port = tcp[1], tcp[2]
    if found in WILDCARDS - {"0.0.0.0"} or (binds_all and found in WILDCARDS):
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    if found.strip("[]") == host or (LOOPBACK.fullmatch(found) and LOOPBACK.fullmatch(host)):
        return endpoint
    if LOOPBACK.fullmatch(found):
        raise BadSpec(f"it sends its events only on its own machine ({endpoint}): {SWITCH_ON}")
    raise BadSpec(
        f"it sends its events to {endpoint}, which is not an address of its own that could be followed: {SWITCH_ON}, "
        f"or {NAME_THEM}"
    )
