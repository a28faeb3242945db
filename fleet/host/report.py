"""A host's report of its replica. New fields go last, with a default."""

from typing import Literal, TypeAlias

from msgspec import Struct

from engines import NATIVE
from events.native import Load

Life: TypeAlias = Literal["starting", "ready", "failing", "draining", "ended"]


class ReplicaAddress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The addresses of a ready replica; our own tell the rest at `url`."""

    url: str
    model: str
    engine: str = NATIVE.name
    events: str | None = None
    replay: str | None = None
    incarnation: str = ""  # another one for every process


class Said(Struct, frozen=True, kw_only=True):
    """The part of a report that people and programs read as it is."""

    since: float = 0.0  # Unix time of the last change of `life`
    node: str = ""  # its address
    pid: int | None = None
    starts: int = 0  # starts of its process in this life of the host
    log: str = ""  # the file on its node
    last_words: tuple[str, ...] = ()  # lines of the process that ended last
    notes: tuple[str, ...] = ()  # its words about its settings
    load: Load = Load()
    hit_rate: float = 0.0  # a share of prompt tokens, over the last seconds
    prompt_tokens_per_s: float = 0.0
    open_requests: int = 0
    total_blocks: int = 0
    block_size: int = 0
    measured_at: float = 0.0  # Unix time of `load`; 0: never
    generated_tokens_per_s: float = 0.0
    token_s: float = 0.0  # the time between two tokens of an answer; 0: not known


class Report(Said, frozen=True, kw_only=True):
    """`version` grows with every report of one host; a restarted host has another `host`."""

    name: str
    host: str  # the name of this life of the host; a restart has another one
    version: int = 0
    life: Life = "starting"
    why: str = ""  # the end of the process before this one; empty while all is well
    place: ReplicaAddress | None = None  # while it is ready or draining
    kv_read: str = ""  # the endpoint at which neighbours read its blocks


def beat(report: Report) -> tuple[object, ...]:
    """Return the part of a report that changes more seldom than its measurements."""
    return (report.host, report.life, report.why, report.place, report.pid, report.starts)
