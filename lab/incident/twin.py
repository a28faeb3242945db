"""One replica's state in a replay: recorded events update the index, recorded statuses the load.

The log says which batch and which status the router knew at each decision. The recorder received them some milliseconds
earlier or later, so the log decides their order, and the recorder's clock only far from any decision.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from events.feed import Feed
from events.native import Status
from events.recording.recording import feed_record
from events.source import Record, Source
from lab.incident.facts import status_of
from router.log_lines import Report, Weighed
from router.members.feed import ReplicaFeed
from router.placement.ages import CacheAges, Reuse
from router.placement.placement import Placement

LOGGED_ENDPOINT = "tcp://logged"  # logs say only whether a replica had one
AHEAD_S = 2.0  # most by which recorder and router may have received something at different times


class Heard(NamedTuple):
    status: Status
    at_s: float  # by the router's clock; exact if it is logged
    order: int | None  # None: not logged


class LoggedAges(CacheAges):
    """Cache ages that return the logged loss: computing it would take all prompts ever sent to the replica."""

    def __init__(self) -> None:
        super().__init__(Reuse())
        self.logged_tokens = 0.0

    @property
    def may_evict(self) -> bool:
        return self.logged_tokens > 0

    def lost_tokens(self, tokens: float, now_s: float, price: float = 1.0, from_host: float = 0.0) -> float:
        del tokens, now_s, price, from_host
        return self.logged_tokens


class Twin:
    """A replica in a replay: `take` its records, then apply those that the router knew with `hear` and `know`."""

    def __init__(
        self, name: str, placement: Placement, source: Source | None, *, hashes_are_keys: bool = False
    ) -> None:
        self.load = placement.add(name)
        self.candidate = self.load.candidate
        self.candidate.ages = self.ages = LoggedAges()
        self.in_step_s: float | None = None  # time from which its events are complete, by the recorder's clock
        self.last_report_ts: float | None = None
        self._placement = placement
        self._feed: Feed | None = None
        if source is not None:
            own, is_named = replace(source, name=name), hashes_are_keys or source.native
            self._feed = Feed(ReplicaFeed(placement.index, self.candidate.slot, own, hashes_are_keys=is_named).view)
        self._incarnation: int | None = None
        self._records: deque[Record] = deque()
        self._heard: deque[Heard] = deque()
        self._is_new = True
        self._told = (0, 0)  # running and waiting requests, if it is scraped

    @property
    def is_recorded(self) -> bool:
        return self._feed is not None

    @property
    def last_seq(self) -> int:
        return -1 if self._feed is None else self._feed.view.stream.last_seq

    @property
    def inexact(self) -> str | None:
        return None if self._feed is None else self._feed.view.inexact

    # ---- records

    def take(self, record: Record, offset_s: float, reports: Mapping[float, Report]) -> None:
        """Queue a record of its own or of the recorder. `offset_s`: the recorder's clock minus the router's."""
        self._records.append(record)
        if (status := status_of(record)) is None:
            return
        report = reports.get(status.ts)
        if report is None:
            self._heard.append(Heard(status, record.time - offset_s, None))
        else:
            self._heard.append(Heard(status, report.at_s, report.order))

    def know(self, seq: int, now_s: float, *, alone: bool) -> None:
        """Apply its events up to this batch; `now_s` by the recorder's clock. `alone`: gaps are not repaired."""
        feed = self._feed
        if feed is None:
            return
        while self._records and self._is_due(self._records[0], seq, now_s):
            record = self._records.popleft()
            feed_record(feed, record)
            if alone and feed.view.stream.repairing:
                feed.tick(record.time)
            if self.in_step_s is None and feed.view.inexact is None:
                self.in_step_s = record.time

    def _is_due(self, record: Record, seq: int, now_s: float) -> bool:
        if record.time < now_s - AHEAD_S:
            return True
        number = record.seq
        if number is not None:
            return number <= seq
        return record.time <= now_s or self.last_seq < seq

    def hear(self, order: int, now_s: float, last_ts: float | None = None) -> None:
        """Apply its statuses up to this moment of the router, but none later than `last_ts`."""
        due = 0
        for number, heard in enumerate(self._heard, start=1):
            if last_ts is not None and heard.status.ts > last_ts:
                break
            if heard.order is not None and heard.order > order:
                break
            if heard.order is not None or heard.status.ts == last_ts or heard.at_s <= now_s:
                due = number
        for _ in range(due):  # as `router.monitor.upkeep` does
            status, at_s, _order = self._heard.popleft()
            if self._incarnation not in (None, status.incarnation):
                self._placement.restarted(self.load)
            self._incarnation = status.incarnation
            self.last_report_ts = status.ts
            self.load.reported(status.load, at_s)

    # ---- what only the log says

    def see(self, weighed: Weighed, now_s: float) -> None:
        """Take from the log its availability, its size and, without recorded statuses, its load."""
        candidate, load = self.candidate, self.load
        candidate.unavailable, candidate.may_try_anyway = weighed.unavailable, weighed.may_try_anyway
        candidate.slowness, candidate.limit = weighed.slowness, weighed.limit
        candidate.max_model_len, candidate.role = weighed.max_model_len, weighed.role
        self._placement.trust(candidate.slot, weighed.trust)
        self._placement.offers(load, LOGGED_ENDPOINT if weighed.kv_layout else "", weighed.kv_layout)
        self.ages.logged_tokens = weighed.lost_tokens
        if (load.block_size, load.total_blocks) != (weighed.cache_block_tokens, weighed.cache_blocks):
            load.describe(weighed.cache_block_tokens, weighed.cache_blocks)
        if self._is_new:
            self._is_new, candidate.assigned_tokens = False, weighed.assigned_tokens
        load.tick(now_s)
        told = (weighed.running, weighed.waiting)
        if weighed.report is not None and not self.is_recorded:
            self._believe(weighed)
        elif weighed.report is None and told != self._told:
            load.scraped(*told, now_s)
            self._told = told

    def _believe(self, weighed: Weighed) -> None:
        """Use the logged figures until something changes them, as its statuses were not recorded."""
        candidate = self.candidate
        candidate.queued_tokens, candidate.running = weighed.queued_tokens, weighed.running
        candidate.waiting, candidate.all_in_flight = weighed.waiting, weighed.in_flight
        candidate.prefill_tokens_per_s = weighed.prefill_tokens_per_s
        candidate.load_tokens_per_s = weighed.load_tokens_per_s
        candidate.empty_tokens, candidate.assigned_tokens = weighed.empty_tokens, weighed.assigned_tokens
