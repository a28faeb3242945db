"""The states of a stream, how each reacts, and the repair under way in some of them."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from events.stream.actions import Action


class StreamStats(Struct):
    batches: int = 0
    payload_bytes: int = 0
    gaps: int = 0
    missing_batches: int = 0
    replayed_batches: int = 0
    lost_batches: int = 0
    duplicates: int = 0
    restarts: int = 0
    reconnects: int = 0
    replays: int = 0
    snapshots: int = 0
    digests_compared: int = 0
    digest_mismatches: int = 0
    dropped_waiting: int = 0
    repairs: int = 0  # requests for missing or doubtful batches; not those of a start, a restart or an idle stream


class StreamConfig(Struct, frozen=True):
    can_replay: bool = True
    repair_timeout_s: float = 0.5
    repair_attempts: int = 4
    snapshot_interval_s: float = 0.2  # doubles while snapshots do not help
    snapshot_interval_at_most_s: float = 30.0
    status_timeout_s: float = 2.0
    behind_grace_s: float = 0.05
    probe_after_s: float = 1.0
    probe_at_most_s: float = 10.0
    max_held_batches: int = 20_000
    max_held_bytes: int = 64 * 2**20
    # A replay brings no more than these (vLLM keeps 10,000): their live copies may still be on their way.
    remembered_batches: int = 16_384


Reaction: TypeAlias = Callable[..., list[Action]]


class State(StrEnum):
    FOLLOWING = "batches are applied as they come"
    GAP = "a replay of missing batches is awaited"
    # states of a foreign replica only
    JOIN = "the first replay is awaited"
    PROOF = "a replay is to prove that the publisher is the same as before the reconnect"
    PROBE = "a replay is to show whether an idle stream has lost its tail"
    # states of a native replica only
    SNAPSHOT = "a snapshot is awaited"
    PAUSE = "a snapshot is to be asked for later"
    OVERSIZED = "snapshots are too long to be read: what is lost stays lost"


IN_ORDER = {State.FOLLOWING, State.PROBE, State.OVERSIZED}  # live batches wait for a repair in all other states


class Repair(Struct):
    """The request under way; all but the deadline and the attempts are a replay's."""

    deadline_s: float
    attempts: int = 1
    start: int = 0
    overlaps: bool = False  # the replay brings a batch we know
    missing_to: int = -1
    replies: int = 0
    proves_tail: bool = True  # asked after the last standstill of the reader

    def tries_again(self, now_s: float, config: StreamConfig) -> bool:
        """Begin another attempt, with twice the time for an answer; return False if none is left."""
        if self.attempts >= config.repair_attempts:
            return False
        self.attempts += 1
        self.replies = 0
        self.deadline_s = now_s + config.repair_timeout_s * 2 ** (self.attempts - 1)
        return True


class Row(NamedTuple):
    """The reaction of one state to each fact."""

    live: Reaction
    replayed: Reaction
    replay_ended: Reaction
    snapshot: Reaction
    tick: Reaction
