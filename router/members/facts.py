"""A replica's description of itself, parsed from its answers: its models, and the caches behind its URL. Pure.

An answer may come from a broken or hostile machine: it is bounded, and only sockets of the replica's own host are
followed. Each sentence for a user ends with what to change.
"""

import re
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from api.native import is_kv_endpoint
from engines import NATIVE, owned_by, profile_of
from engines.metrics import MAX_BLOCKS
from engines.profile import EngineProfile
from engines.sources import NAME_THEM, NO_EVENTS, SWITCH_ON, Sources
from events.publisher import EventEndpoints, offset_port
from events.source import Source
from router.members.spec import AUTO, MAX_BLOCK_TOKENS, OFF, SOCKETS, TCP, WILDCARDS, BadSpec, ModelName, ReplicaSpec
from router.placement.cost import Role

LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[?::1\]?")

# ---- the caches behind one URL, and each one's event sockets

OWN_URLS = "give each rank a URL of its own"


class Rank(Struct, frozen=True):
    """One cache: its completed spec, which has the rank's name, and its place in the engine."""

    spec: ReplicaSpec
    number: int | None = None  # its number in events and metrics; None: there is only one
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
        sockets = {name: offset_port(end, typed_offset) for name in SOCKETS if (end := getattr(spec, name)) is not None}
        return Rank(msgspec.structs.replace(named, **sockets))
    try:
        publisher = sources.publishers.get(number)
        if publisher is None:
            raise BadSpec(sources.why_not)
        if not publisher.enable_kv_cache_events or publisher.publisher != "zmq" or not publisher.endpoint:
            raise BadSpec(NO_EVENTS)
        replay, load = None, publisher.load_endpoint and reachable(spec, publisher.load_endpoint)
        with suppress(BadSpec):  # the stream itself can be followed; its state says what is missing
            replay = publisher.replay_endpoint and reachable(spec, publisher.replay_endpoint, binds_all=True)
        events, topic = reachable(spec, publisher.endpoint), spec.topic or publisher.topic
        Source(name, events, replay).check()
    except ValueError as error:
        return Rank(msgspec.structs.replace(named, events=OFF, replay=None), why_no_events=str(error))
    return Rank(msgspec.structs.replace(named, events=events, replay=replay, status=load, topic=topic))


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


MAX_MODELS = 4096  # the most models of one replica, adapters included
MAX_LAYOUT_CHARS = 256


class Facts(Struct, frozen=True):
    """A replica, as it described itself."""

    spec: ReplicaSpec  # completed
    models: tuple[str, ...]  # names that clients may ask for, its base model first
    adapters: frozenset[str] = frozenset()  # those of `models` that are LoRA adapters
    changes_adapters: bool = False  # it may load and unload them without a word
    tokenizer: str | None = None  # "bytes": a token is a byte
    total_blocks: int | None = None
    draining: bool = False
    loading: bool = False  # its sockets are not known yet, so do not take it for a replica without events
    ranks: tuple[Rank, ...] = ()  # its caches, at least one
    kv_read: str = ""  # the endpoint at which neighbours may read its blocks; empty: none
    kv_layout: str = ""  # only replicas of one layout can use each other's blocks

    @property
    def profile(self) -> EngineProfile:
        return profile_of(self.spec.engine)


class _Pool(Struct, frozen=True):
    total: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0


class NativeDescription(Struct, frozen=True):
    """The part of GET /load that describes the replica."""

    model: ModelName
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)]
    max_model_len: Annotated[int, Meta(ge=1, lt=2**31)]
    topic: str | None = None
    incarnation: int | None = None  # None: the model is still being loaded
    endpoints: EventEndpoints | None = None
    draining: bool = False
    kv_read: str | None = None  # the endpoint at which neighbours may read its blocks
    kv_layout: Annotated[str, Meta(max_length=MAX_LAYOUT_CHARS)] | None = None  # their model, type and shape
    role: Role | None = None
    tokenizer: str | None = None
    pool: _Pool = _Pool()
    adapters: Annotated[list[ModelName], Meta(max_length=MAX_MODELS)] | None = None  # None: it computes with none


class _Model(Struct, frozen=True):
    id: ModelName
    owned_by: str | None = None
    parent: str | None = None
    root: str | None = None
    max_model_len: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


class _Models(Struct, frozen=True):
    data: Annotated[list[_Model], Meta(max_length=MAX_MODELS)]


_decode_native = msgspec.json.Decoder(NativeDescription).decode
_decode_models = msgspec.json.Decoder(_Models).decode


def native_facts(spec: ReplicaSpec, body: bytes) -> Facts | None:
    """Parse the answer to GET /load; None if it is not a native replica's."""
    try:
        answer = _decode_native(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    completed = with_description(spec, answer)
    kv_read, kv_layout = readable_at(completed, answer)
    adapters = frozenset(answer.adapters or ()) - {answer.model}
    return Facts(
        spec=completed,
        models=(answer.model, *sorted(adapters)),
        adapters=adapters,
        tokenizer=answer.tokenizer,
        total_blocks=answer.pool.total or None,
        draining=answer.draining,
        loading=answer.incarnation is None,
        ranks=(Rank(completed),),
        kv_read=kv_read,
        kv_layout=kv_layout,
    )


def with_description(spec: ReplicaSpec, described: NativeDescription) -> ReplicaSpec:
    """Complete the spec by the replica's description of itself; what is set already stays."""
    if spec.model is not None and spec.model != described.model:
        raise BadSpec(f"{spec.name} serves {described.model!r}, not {spec.model!r}; correct model, or leave it out")
    found: dict[str, Any] = {"engine": NATIVE.name, "model": described.model}
    if spec.block_size is None:
        found["block_size"] = described.block_size
    if spec.max_model_len is None:
        found["max_model_len"] = described.max_model_len
    if spec.incarnation is None:
        found["incarnation"] = described.incarnation
    if spec.role is None:
        found["role"] = described.role
    if spec.events is None and described.endpoints is not None:
        found |= {field: _seen_from_here(spec, getattr(described.endpoints, field)) for field in SOCKETS}
        found["topic"] = spec.topic or described.topic or ""
    return msgspec.structs.replace(spec, **found)


def readable_at(spec: ReplicaSpec, described: NativeDescription) -> tuple[str, str]:
    """The endpoint at which other replicas may read its blocks, and their layout; empty if they may not.

    An endpoint on the router's own machine is no use elsewhere: such replicas only read from each other.
    """
    endpoint, layout, host = described.kv_read or "", described.kv_layout or "", spec.target.host
    tcp = TCP.fullmatch(endpoint)
    if tcp is None or not layout or (LOOPBACK.fullmatch(tcp[1]) and not LOOPBACK.fullmatch(host)):
        return "", ""
    endpoint = _seen_from_here(spec, endpoint) or ""
    if not is_kv_endpoint(endpoint):
        return "", ""
    reached = TCP.fullmatch(endpoint)
    is_local = reached is not None and LOOPBACK.fullmatch(reached[1])
    return endpoint, f"{layout} on this machine" if is_local else layout


def _seen_from_here(spec: ReplicaSpec, endpoint: str | None) -> str | None:
    """The endpoint as seen from here: a replica that binds all addresses does not know which one reaches it."""
    tcp, host = TCP.fullmatch(endpoint or ""), spec.target.host
    if tcp is None:
        return endpoint
    if tcp[1] in WILDCARDS:
        return f"tcp://[{host}]:{tcp[2]}" if ":" in host else f"tcp://{host}:{tcp[2]}"
    if LOOPBACK.fullmatch(tcp[1]) and not LOOPBACK.fullmatch(host):
        # The port belongs to another process on the router's machine.
        raise BadSpec(
            f"{spec.name} sends its events only on its own machine ({endpoint}); start it with --events-host '*', "
            "or name it with events=off"
        )
    return endpoint


def foreign_facts(spec: ReplicaSpec, body: bytes) -> Facts:
    """Parse the answer to GET /v1/models; raise BadSpec if it names no model, or not that of the spec."""
    try:
        models = _decode_models(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadSpec(f"{spec.name}: /v1/models does not answer as OpenAI's does ({error})") from error
    adapters = {model.id for model in models if model.parent is not None} | set(spec.adapters)
    bases = [model for model in models if model.id not in adapters]
    if not bases:
        raise BadSpec(f"{spec.name}: /v1/models names no model")
    if spec.model is not None and spec.model not in [model.id for model in bases]:
        raise BadSpec(f"{spec.name} serves {bases[0].id!r}, not {spec.model!r}; correct model, or leave it out")
    base = next((model for model in bases if model.id == spec.model), bases[0])
    others = [model.id for model in bases if model is not base]  # further names of the same model
    return Facts(
        spec=msgspec.structs.replace(
            spec,
            model=base.id,
            engine=owned_by(base.owned_by).name if spec.engine == AUTO else spec.engine,
            max_model_len=spec.max_model_len or base.max_model_len,
        ),
        models=(base.id, *others, *sorted(adapters)),
        adapters=frozenset(adapters),
        changes_adapters=True,
    )
