"""Questions that workers ask each other, and what is told."""

from msgspec import Struct

from router.members.counts import ReplicaCounts
from router.members.spec import ReplicaSpec
from router.prompts.prefixes.recent import RecentPrompt
from router.responses import DecisionRecord
from router.tenants.usage import Row
from router.workers.colleagues import Question


class OfReplica(Struct):
    in_flight: int
    counts: ReplicaCounts


class Figures(Struct):
    """A worker's part of what the dashboard shows as one figure."""

    replicas: dict[str, OfReplica]
    waiting: int
    unserved: int


class Changes(Struct):
    """The replicas, and how they came: for a worker that starts now, and may be unable to find them."""

    serves: bool  # False: it has just started, too, or lacks keys or rewrites
    found: dict[str, ReplicaSpec]  # discovery has found these
    added: dict[str, ReplicaSpec]  # requests have added these
    draining: list[str]  # requests have drained these


FIGURES = Question("figures", Figures)
CHANGES = Question("changes", Changes)
NOT_READY = Question("not ready", str)  # why; empty: it is
RECENT = Question("recent", list[RecentPrompt])
DECIDED = Question("decided", list[DecisionRecord])  # newest first
USAGE = Question("usage", list[Row])  # about a Selection: what is in no file
LEARN_AGAIN = Question("learn again", bool)  # names the servers whose offer has changed
FORGET = Question("forget", bool)  # about a model's name: none of its replicas is to come back
EXPECT_CLEAR = Question("expect clear", bool)  # all replicas are about to clear their caches
