"""One router's state, rebuilt fact by fact from its log and from a recording of its replicas' events and statuses.

The log says which batch and which status the router knew at each decision. The recorder received them some milliseconds
earlier or later, so the log decides their order, and the recorder's clock only far from any decision.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from events.native import Status
from events.recording.recording import Recording, feed_record
from events.source import Record, Source
from events.view import CacheView
from lab.incident.comparison import Beside, beside
from lab.incident.facts import Fact, Run, Survey, status_of
from lab.replay import ReplayState, ReplicaReplay
from router.log_lines import Decided, LogLine, Report, Sending, Weighed
from router.members.feed import ReplicaFeed
from router.placement.ages import CacheAges, Reuse
from router.placement.decision import Decision
from router.placement.elsewhere import fetch
from router.placement.index import APPROXIMATE
from router.placement.load import Placed
from router.placement.placement import Placement

LOGGED_ENDPOINT = "tcp://logged"  # logs say only whether a replica had one
AHEAD_S = 2.0  # most by which recorder and router may have received something at different times


class LoggedPrompt(NamedTuple):
    tokens: int
    exact: bool
    blocks: list[int]
    approximate_block_tokens: float = 0.0  # guesses are taken from the log

    def keys(self, block_size: int, lookahead: int = 0, /) -> list[int]:  # noqa: ARG002
        """The logged keys, which have one block size only."""
        return self.blocks


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


class TimedStatus(NamedTuple):
    status: Status
    at_s: float  # the router's time; exact if it is logged
    order: int | None  # None: not logged


class RecordedReplica(ReplicaReplay):
    """Takes its records, then applies those that the router knew at a moment."""

    def __init__(
        self, placement: Placement, name: str, source: Source | None, *, hashes_are_keys: bool = False
    ) -> None:
        super().__init__(placement, name)
        self.candidate.ages = self.ages = LoggedAges()
        self.in_step_s: float | None = None  # time from which its events are complete, by the recorder's clock
        self.last_report_ts: float | None = None
        self._view: CacheView | None = None
        if source is not None:
            own, is_named = replace(source, name=name), hashes_are_keys or source.native
            self._view = ReplicaFeed(placement.index, self.candidate.slot, own, hashes_are_keys=is_named).view
        self._incarnation: int | None = None
        self._records: deque[Record] = deque()
        self._statuses: deque[TimedStatus] = deque()
        self._is_new = True
        self._scraped = (0, 0)  # running and waiting requests, if it reports nothing

    @property
    def is_recorded(self) -> bool:
        return self._view is not None

    @property
    def last_seq(self) -> int:
        return -1 if self._view is None else self._view.stream.last_seq

    @property
    def inexact(self) -> str | None:
        return None if self._view is None else self._view.inexact

    def take(self, record: Record, offset_s: float, reports: Mapping[float, Report]) -> None:
        """Queue a record of its own. `offset_s`: the recorder's clock minus the router's."""
        self._records.append(record)
        if (status := status_of(record)) is not None:
            report = reports.get(status.ts)
            at_s, order = (record.time - offset_s, None) if report is None else (report.at_s, report.order)
            self._statuses.append(TimedStatus(status, at_s, order))

    def apply_events(self, seq: int, now_s: float, *, alone: bool) -> None:
        """Apply its events up to this batch; `now_s` by the recorder's clock. `alone`: gaps are not repaired."""
        view = self._view
        if view is None:
            return
        while self._records and self._is_due(self._records[0], seq, now_s):
            record = self._records.popleft()
            feed_record(view, record)
            if alone and view.stream.repairing:
                view.receive("tick", [], record.time)
            if self.in_step_s is None and view.inexact is None:
                self.in_step_s = record.time

    def _is_due(self, record: Record, seq: int, now_s: float) -> bool:
        if record.time < now_s - AHEAD_S:
            return True
        number = record.seq
        if number is not None:
            return number <= seq
        return record.time <= now_s or self.last_seq < seq

    def apply_statuses(self, order: int, now_s: float, last_ts: float | None = None) -> None:
        """Apply its statuses up to this moment of the router, but none later than `last_ts`."""
        due = 0
        for number, (status, at_s, status_order) in enumerate(self._statuses, start=1):
            if last_ts is not None and status.ts > last_ts:
                break
            if status_order is not None and status_order > order:
                break
            if status_order is not None or status.ts == last_ts or at_s <= now_s:
                due = number
        for _ in range(due):  # `router.monitor.upkeep` does so, too
            status, at_s, _order = self._statuses.popleft()
            if self._incarnation not in (None, status.incarnation):
                self.placement.restarted(self.load)
            self._incarnation = status.incarnation
            self.last_report_ts = status.ts
            self.load.reported(status.load, at_s)

    def take_logged(self, weighed: Weighed, now_s: float) -> None:
        """Take from the log its availability, its size and, without recorded statuses, its load."""
        candidate, load = self.candidate, self.load
        candidate.unavailable, candidate.may_try_anyway = weighed.unavailable, weighed.may_try_anyway
        candidate.slowness, candidate.limit = weighed.slowness, weighed.limit
        candidate.max_model_len, candidate.role = weighed.max_model_len, weighed.role
        self.placement.trust(candidate.slot, weighed.trust)
        self.placement.offers(load, LOGGED_ENDPOINT if weighed.kv_layout else "", weighed.kv_layout)
        self.ages.logged_tokens = weighed.lost_tokens
        if (load.block_size, load.total_blocks) != (weighed.cache_block_tokens, weighed.cache_blocks):
            load.describe(weighed.cache_block_tokens, weighed.cache_blocks)
        if self._is_new:
            self._is_new, candidate.assigned_tokens = False, weighed.assigned_tokens
        load.tick(now_s)
        scraped = (weighed.running, weighed.waiting)
        if weighed.report is None:
            if scraped != self._scraped:
                load.scraped(*scraped, now_s)
                self._scraped = scraped
        elif not self.is_recorded:  # its statuses are not there: the logged figures count until something changes them
            candidate.queued_tokens, candidate.running = weighed.queued_tokens, weighed.running
            candidate.waiting, candidate.all_in_flight = weighed.waiting, weighed.in_flight
            candidate.prefill_tokens_per_s = weighed.prefill_tokens_per_s
            candidate.answer_delay_s, candidate.load_tokens_per_s = weighed.answer_delay_s, weighed.load_tokens_per_s
            candidate.empty_tokens, candidate.assigned_tokens = weighed.empty_tokens, weighed.assigned_tokens


class RecordedRouter(ReplayState):
    """The replay of one run: `advance` applies its facts in order, `again` repeats a decision."""

    def __init__(self, recording: Recording, run: Run, survey: Survey) -> None:
        super().__init__()
        self.replicas: dict[str, RecordedReplica] = {}
        self.guessed: dict[str, int] = {}  # the number of each replica's matches that come from the log
        self._survey = survey
        self._offset_s = survey.offset_s[run.name]
        self._is_damaged = bool(recording.damage)
        models = {one.name: line for line in run.lines for decided in line.decisions for one in decided.candidates}
        for name, line in models.items():
            number = survey.sources.get(name)
            source = None if number is None else recording.sources[number]
            if source is not None and not source.model:
                source = replace(source, model=line.base_model or line.model)
            is_redacted = recording.header.redacted
            self.replicas[name] = RecordedReplica(self.placement, name, source, hashes_are_keys=is_redacted)
        self._by_source = {at: self.replicas[name] for name, at in survey.sources.items() if name in self.replicas}
        self._reports: dict[int, dict[float, Report]] = {}  # reports by source and time
        for one in run.weighed:
            if one.report is not None and one.name in survey.sources:
                self._reports.setdefault(survey.sources[one.name], {})[one.report.ts] = one.report
        self._records = recording.records()
        self._next = next(self._records, None)

    def advance(self, fact: Fact) -> None:
        """Apply everything before this fact, and the fact itself; decisions are left to `again`."""
        recorder_s = fact.at_s + self._offset_s
        while (record := self._next) is not None and record.time <= recorder_s + AHEAD_S:
            if (replica := self._by_source.get(record.source)) is not None:
                replica.take(record, self._offset_s, self._reports.get(record.source, {}))
            self._next = next(self._records, None)
        candidates = fact.of.candidates if isinstance(fact.of, Decided) else []
        known = {one.name: one for one in candidates}
        for name, replica in self.replicas.items():
            report = known[name].report if name in known else None
            replica.apply_statuses(fact.order, fact.at_s, report.ts if report is not None else None)
        self.placement.expire(fact.at_s)
        for one in candidates:
            if one.seq is not None:
                self.replicas[one.name].apply_events(one.seq, recorder_s, alone=self._is_damaged)
            self.replicas[one.name].take_logged(one, fact.at_s)
        if isinstance(fact.of, Sending):
            if fact.kind == "sent":
                line, sent = fact.line, fact.of
                weighed = (side for decided in line.decisions for side in decided.candidates)
                known_sizes = (side.block_tokens for side in weighed if side.name == sent.replica)
                has_blocks = line.exact and next(known_sizes, APPROXIMATE) == line.block_tokens
                load = self.replicas[sent.replica].load
                placed = Placed(load, sent.sent_at_s, sent.uncached_tokens, sent.streamed, sent.priority_s)
                placed.fetched_tokens, placed.stands_back = sent.fetched_tokens, sent.stands_back
                wait_s = sent.awaited_s if has_blocks and line.blocks else 0.0
                blocks = line.blocks if has_blocks else []
                self.placed[sent.sent_order] = self.placement.sent_as(placed, blocks, wait_s)
            else:
                (self.begun if fact.kind == "begun" else self.ended)(fact.of.sent_order, fact.at_s)

    def again(self, line: LogLine, decided: Decided, policy: str) -> Decision:
        """Decide again with the present code and the logged tie-break seed."""
        candidates = [self.replicas[one.name].candidate for one in decided.candidates]
        own = [one for one in decided.candidates if self._is_matched(line, one)]
        slots = {line.block_tokens: sum(1 << self.replicas[one.name].candidate.slot for one in own)} if own else {}
        question, _ = self.placement.question(
            LoggedPrompt(line.prompt_tokens, line.exact, line.blocks),
            slots,
            decided.at_s,
            session=line.session,
            tried=frozenset(decided.tried),
            came_s=decided.came_s,
            half=decided.half,
            further_tokens=line.further_tokens,
        )
        question.turn, question.behind_s, question.stands_back = decided.turn, decided.behind_s, decided.stood_back
        matched, readable = dict(question.matched), dict(question.readable)
        below = {source: dict(level) for source, level in question.below.items()}
        for one in decided.candidates:
            if one not in own:
                slot = self.replicas[one.name].candidate.slot
                matched[slot] = one.matched_tokens
                for source_name, tokens in one.below_tokens().items():
                    below.setdefault(source_name, {})[slot] = tokens
                if one.readable_tokens:
                    readable[slot] = one.readable_tokens
        question.matched, question.below, question.readable = matched, below, readable
        if decided.is_fetched or decided.source is not None:
            source = None if decided.source is None else self.replicas[decided.source].candidate
            fetch(question, candidates, source)
        return self.decide(question, candidates, policy=policy, seed=decided.lot)

    def _is_matched(self, line: LogLine, one: Weighed) -> bool:
        """True if its matches are looked up in the index, false if they are taken from the log."""
        has_blocks = line.exact and one.block_tokens != APPROXIMATE and one.block_tokens == line.block_tokens
        return has_blocks and one.seq is not None and self.replicas[one.name].is_recorded

    def beside(self, line: LogLine, decided: Decided, decision: Decision) -> list[Beside]:
        seqs: list[int | None] = []
        for one in decided.candidates:
            looked_up = self._is_matched(line, one)
            seqs.append(self.replicas[one.name].last_seq if looked_up else one.seq)
            if not looked_up:
                self.guessed[one.name] = self.guessed.get(one.name, 0) + 1
        return beside(decided, decision, seqs)

    def uncovered(self, decided: Decided) -> str | None:
        """The reason why the recording does not cover this decision; None if it does."""
        recorder_s = decided.at_s + self._offset_s
        for one in decided.candidates:
            replica = self.replicas[one.name]
            if not replica.is_recorded or one.seq is None:
                continue
            if replica.in_step_s is None or replica.in_step_s > recorder_s:
                return "before the recording knew a replica's whole cache"
            behind = replica.last_seq != one.seq or (one.report is not None and replica.last_report_ts != one.report.ts)
            if behind and recorder_s > self._survey.end_s:
                return "after the recording's end"
            if one.report is not None and replica.last_report_ts is None:
                return "before the recording knew of a replica's load"
            if self._is_damaged and replica.inexact is not None:
                return "in or after a damaged part of the recording"
        return None
