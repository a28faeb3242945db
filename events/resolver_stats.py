"""A resolver's counters."""

from msgspec import Struct


class ResolverStats(Struct):
    stored_blocks: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    duplicate_blocks: int = 0
    orphan_blocks: int = 0
    orphans_resolved: int = 0
    orphans_dropped: int = 0
    unpaired_blocks: int = 0
    reported_blocks: int = 0  # resident ones, told again because a request asked for it
    removed_unknown: int = 0
    unknown_events: int = 0
    rejected_events: int = 0
    remote_blocks: int = 0  # stored or removed in a place that is not the replica's own
    refused_blocks: int = 0  # beyond what the replica can hold
