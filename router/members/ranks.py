"""The caches behind one URL and the event sockets of each, from an engine's own answers. Pure.

An answer may come from a broken or hostile machine: it is bounded, and only sockets of the replica's own host are
followed. Each sentence for a user ends with what to change.
"""

import re
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from events.publisher import offset_port
from events.source import Source
from router.members.spec import LOOPBACK, OFF, TCP, WILDCARDS, BadSpec, ReplicaSpec

MOST_RANKS = 256  # behind one URL
SWITCH_ON = (
    'start it with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}\''
)
NAME_THEM = "name them: events=tcp://HOST:PORT,replay=tcp://HOST:PORT"
OWN_URLS = "give each rank a URL of its own"
STEERED_SGLANG = (0, 5, 10)  # the first version that obeys RANK_HEADER
RANK_HEADER = "x-data-parallel-rank"

Endpoint = Annotated[str, Meta(max_length=256)]
_ENGINES = re.compile(rb'^vllm:num_requests_running\{(?:[^}\n]*,)?engine="([0-9]{1,3})"', re.M)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})")


class Publisher(Struct, frozen=True):
    """An engine's settings of its events, as vLLM and SGLang write them."""

    enable_kv_cache_events: bool = True
    publisher: str | None = None
    endpoint: Endpoint | None = None
    replay_endpoint: Endpoint | None = None
    topic: Endpoint = ""


class Sources(Struct, frozen=True):
    """The engine's word: its ranks by number, and why some or all of them cannot be followed."""

    publishers: dict[int, Publisher | None] = {}  # None: this rank sends no events
    why_not: str = ""
    steered: bool = True  # requests can be sent to one rank
    failed: bool = False  # the engine could not answer this time


class Rank(Struct, frozen=True):
    """One cache: its completed spec, which has the rank's name, and its place in the engine."""

    spec: ReplicaSpec
    number: int | None = None  # as events and metrics count; None: there is only one
    header: bytes = b""  # a line that steers a request there
    why_no_events: str = ""


class _ServerInfo(Struct, frozen=True):
    """The part of SGLang's /server_info that describes its events."""

    kv_events_config: str | None = None
    dp_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    version: Annotated[str, Meta(max_length=64)] = ""


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_vllm = msgspec.json.Decoder(
    Annotated[dict[Annotated[int, Meta(ge=0, lt=2**16)], Publisher], Meta(max_length=MOST_RANKS)]
).decode
_decode_sglang = msgspec.json.Decoder(_ServerInfo).decode
_decode_publisher = msgspec.json.Decoder(Publisher).decode


# ---- the engines' answers


def vllm_sources(status: int, body: bytes, metrics: bytes = b"") -> Sources:
    """Read the answer to GET /kv_event_sources; `metrics` name the ranks if it does not."""
    engines = sorted({int(number) for number in _ENGINES.findall(metrics)})[:MOST_RANKS]
    silent: dict[int, Publisher | None] = dict.fromkeys(engines)
    if status == 404:
        return Sources(silent, f"vLLM before 0.33 does not tell its event sockets: {NAME_THEM}", steered=False)
    if status != 200:
        why = f"it answers /kv_event_sources with status {status}: {NAME_THEM}"
        return Sources(silent, why, failed=status >= 500)
    try:
        publishers = _decode_vllm(body)
    except UNREADABLE as error:
        return Sources(silent, f"its answer to /kv_event_sources cannot be read ({error}): {NAME_THEM}")
    if not publishers:
        return Sources(silent, f"it publishes no cache events: {SWITCH_ON}")
    return Sources(dict(sorted(publishers.items())))


def sglang_sources(status: int, body: bytes) -> Sources:
    """Read the answer to GET /server_info."""
    if status != 200:
        return Sources(why_not=f"it answers /server_info with status {status}: {NAME_THEM}", failed=status >= 500)
    try:
        info = _decode_sglang(body)
        config = info.kv_events_config
        base = _decode_publisher(config) if config else None
    except UNREADABLE as error:
        return Sources(why_not=f"its answer to /server_info cannot be read ({error}): {NAME_THEM}")
    numbers = range(info.dp_size)
    version = _VERSION.match(info.version)
    steered = version is not None and tuple(map(int, version.groups())) >= STEERED_SGLANG
    if base is None or base.publisher != "zmq":
        return Sources(dict.fromkeys(numbers), f"it publishes no cache events: {SWITCH_ON}", steered)
    return Sources({number: _offset(base, number) for number in numbers}, steered=steered)


def _offset(base: Publisher, number: int) -> Publisher:
    """A rank's own sockets, where the engine tells only those of rank 0. SGLang binds 0.0.0.0, too."""
    endpoint, replay = base.endpoint or "tcp://*:5557", base.replay_endpoint
    try:
        return msgspec.structs.replace(
            base,
            endpoint=offset_port(endpoint.replace("//0.0.0.0:", "//*:"), number),
            replay_endpoint=None if replay is None else offset_port(replay, number),
        )
    except ValueError:  # no port
        return base


# ---- the ranks of a replica


def ranks_of(spec: ReplicaSpec, sources: Sources) -> tuple[Rank, ...]:
    """The caches of a replica. Sockets in the spec win; they are those of rank 0, and the others follow as ports."""
    numbers = list(sources.publishers)
    if len(numbers) < 2:
        return (_rank(spec, spec.name, numbers[0] if numbers else 0, sources, typed_offset=0),)
    if not sources.steered:
        why = f"its {len(numbers)} data-parallel ranks cannot be chosen by this version of the engine: {OWN_URLS}"
        return (Rank(msgspec.structs.replace(spec, events=OFF, replay=None), why_no_events=why),)
    ranks = []
    for place, number in enumerate(numbers):
        rank = _rank(spec, f"{spec.name}@dp{number}", number, sources, typed_offset=number)
        # The header counts the ranks behind this URL, of which the first may not be the engine's first.
        header = f"{RANK_HEADER}: {place}\r\n".encode()
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
        raise BadSpec(f"it publishes no cache events: {SWITCH_ON}")
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
