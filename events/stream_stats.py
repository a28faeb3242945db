"""A stream's counters."""

from msgspec import Struct


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
    repairs: int = 0  # requests for what was missing or doubted; not those of a start, a restart or an idle stream
