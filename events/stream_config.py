"""The limits and times of a stream."""

from msgspec import Struct


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
    # At least as many as a replay brings (vLLM keeps 10,000): their live copies may still be on their way.
    remembered_batches: int = 16_384
