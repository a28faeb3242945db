"""A publisher's counters."""

from msgspec import Struct


class PublisherStats(Struct):
    batches: int = 0
    events: int = 0
    payload_bytes: int = 0
    skipped_batches: int = 0
    unencodable_events: int = 0
    replays: int = 0
    snapshots: int = 0
    abandoned_transfers: int = 0  # to peers that did not read them
    refused_peers: int = 0  # there were too many
    cut_off_peers: int = 0  # they sent too much
    reopened_sockets: int = 0  # all their peers together subscribed to too many topics
