"""The fields of routers' and replicas' answers that are used here; others are ignored."""

from typing import Any, NamedTuple

from msgspec import Struct

from router.doctor.samples import Samples


class Events(Struct, frozen=True):
    """The events of a replica in GET /replicas; null if none are followed."""

    seq: int = -1
    overclaim: str | None = None


class Known(Struct, frozen=True):
    """One replica in GET /replicas."""

    name: str
    url: str
    engine: str = "auto"
    models: list[str] = []
    available: bool = True
    why: str | None = None
    state: str = "approximate"
    inexact: str | None = None
    block_size: int | None = None
    breaker: str = "closed"
    events: Events | None = None
    trust: float = 1.0


class Candidate(Struct, frozen=True):
    name: str
    matched_tokens: float = 0
    cost_s: float | None = None


class Decision(Struct, frozen=True):
    ts: float
    request_id: str
    policy: str = ""
    chosen: str | None = None
    prompt_tokens: float = 0
    duration_s: float = 0.0
    candidates: list[Candidate] = []


class Replicas(Struct):
    replicas: list[Known]


class Decisions(Struct):
    decisions: list[Decision]


class Loaded(Struct, frozen=True):
    """The answer of GET /load of one of our replicas."""

    model: str = ""
    endpoints: dict[str, Any] | None = None


class OfRouter(NamedTuple):
    metrics: Samples
    replicas: list[Known]
    decisions: list[Decision] | None  # None: they may not be read


class OfReplica(NamedTuple):
    metrics: Samples
    load: Loaded | None = None  # None: it is not one of ours, or demands a key


class Look(NamedTuple):
    """Everything at one moment."""

    at_s: float
    router: OfRouter | None
    replicas: dict[str, OfReplica | str]  # by URL; why, if there is no answer
