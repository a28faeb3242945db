"""A router hears from its peers what they have sent where: it counts these requests like its own, within bounds."""

from collections.abc import Callable, Iterable
from math import inf, isfinite

from msgspec import Struct, field

from router.placement.load import Placed, ReplicaLoad
from router.placement.outbox import PeerBatch
from router.placement.placement import Placement

SILENT_S = 3.0  # after this long without a batch the peer is gone, and its requests are forgotten
MAX_PEERS = 64
MAX_RUNNING = 16_384  # requests of one peer; more are not counted
MAX_KEYS = 500_000  # keys of one peer's requests that have not begun
MAX_AWAITED_S = 3600.0
MAX_PRIORITY_S = 1e6  # the most in either direction
KEY_BYTES = 8


class Peer(Struct, eq=False):
    """One peer, and its requests that have not ended."""

    heard_s: float
    next_number: int
    keys: int = 0  # those of requests that have not begun
    requests: dict[int, Placed] = field(default_factory=dict)


class InboxCounts(Struct):
    requests: int = 0
    ignored: int = 0  # requests to unknown replicas, with strange figures, or beyond the bounds
    lost_batches: int = 0
    corrected: int = 0  # requests whose end was not heard of


class Inbox:
    """`load_of` knows the replicas by name; `own` is this router's number, as its own batches may come back to it."""

    def __init__(self, placement: Placement, load_of: Callable[[str], ReplicaLoad | None], own: int) -> None:
        self.peers: dict[int, Peer] = {}
        self.counts = InboxCounts()
        self._placement = placement
        self._load_of = load_of
        self._own = own
        self._turns = placement.turns

    def hear(self, batch: PeerBatch, now_s: float, at_s: float | None) -> bool:
        """Count what a peer says; return True if a replica may have more room now. `at_s`: None if told at once."""
        if batch.router == self._own:
            return False
        peer = self.peers.get(batch.router)
        if peer is None:
            if len(self.peers) >= MAX_PEERS:
                return False
            peer = self.peers[batch.router] = Peer(now_s, batch.number)
            self._count_peers()
        if batch.number < peer.next_number:
            return False  # it came by another way, too
        peer.heard_s = now_s
        self.counts.lost_batches += batch.number - peer.next_number
        peer.next_number = batch.number + 1
        if at_s is not None and batch.sent and isfinite(batch.at_s):
            self._turns.delayed(at_s - batch.at_s)
        for request in batch.sent:
            load, keys = self._load_of(request.replica), len(request.keys) // KEY_BYTES
            is_bounded = len(peer.requests) < MAX_RUNNING and peer.keys + keys <= MAX_KEYS
            is_sane = len(request.keys) == keys * KEY_BYTES
            is_sane = is_sane and 0.0 <= request.awaited_s <= MAX_AWAITED_S and 0.0 <= request.age_s < inf
            is_sane = is_sane and abs(request.priority_s or 0.0) <= MAX_PRIORITY_S  # NaN is not
            if load is None or request.id in peer.requests or not (is_bounded and is_sane):
                self.counts.ignored += 1
                continue
            self.counts.requests += 1
            placed = peer.requests[request.id] = self._placement.sent_by_peer(load, request, now_s)
            peer.keys += placed.awaited_keys
            if at_s is not None:
                self._turns.heard(batch.router, request.age_s, request.uncached_tokens, now_s)
        for request_id in batch.begun:
            if (begun := peer.requests.get(request_id)) is not None:
                peer.keys -= begun.awaited_keys
                self._placement.begun(begun, now_s)
        has_room = self._ended(peer, batch.ended, now_s)
        if batch.running is not None:
            unheard = peer.requests.keys() - batch.running
            self.counts.corrected += len(unheard)
            has_room |= self._ended(peer, unheard, now_s)
        return has_room

    def expire(self, now_s: float) -> bool:
        """Forget the requests of silent peers; return True if a replica may have more room now."""
        silent = [router for router, peer in self.peers.items() if now_s - peer.heard_s > SILENT_S]
        has_room = False
        for router in silent:
            peer = self.peers.pop(router)
            self._count_peers()
            has_room |= self._ended(peer, list(peer.requests), now_s)
        return has_room

    def _count_peers(self) -> None:
        self._turns.peers = len(self.peers)
        self._turns.before = sum(router < self._own for router in self.peers)

    def _ended(self, peer: Peer, request_ids: Iterable[int], now_s: float) -> bool:
        found = False
        for request_id in request_ids:
            placed = peer.requests.pop(request_id, None)
            if placed is not None:
                found = True
                peer.keys -= placed.awaited_keys
                self._placement.ended(placed, now_s)
        return found

    def check(self) -> None:
        for peer in self.peers.values():
            assert peer.keys == sum(placed.awaited_keys for placed in peer.requests.values())
