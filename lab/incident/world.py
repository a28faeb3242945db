"""One router's state, rebuilt fact by fact: its replicas, its index, its optimistic entries."""

from typing import NamedTuple

from msgspec.structs import replace

from events.recording.recording import Recording
from lab.incident.comparison import Beside, beside
from lab.incident.facts import Asked, Begun, Ended, Fact, Run, Sent, Survey
from lab.incident.twin import AHEAD_S, Twin
from router.config import RouterConfig
from router.log_lines import Decided, LogLine, Report, Weighed
from router.placement.cost import Question
from router.placement.decision import Decision
from router.placement.elsewhere import fetch
from router.placement.index import APPROXIMATE
from router.placement.load import Placed
from router.placement.placement import Placement
from router.placement.policy import Ring

CONFIG = RouterConfig()


class LoggedPrompt(NamedTuple):
    tokens: int
    exact: bool
    blocks: list[int]
    approximate_block_tokens: float = 0.0  # guesses are taken from the log

    def keys(self, block_size: int, lookahead: int = 0, /) -> list[int]:  # noqa: ARG002
        """The logged keys, which have one block size only."""
        return self.blocks


class World:
    """The replay of one run: `goes_on` applies its facts in order, `decide` repeats the decision of an `Asked` fact."""

    def __init__(self, recording: Recording, run: Run, survey: Survey) -> None:
        self.placement = Placement(
            CONFIG.policy,
            optimistic_ttl_s=CONFIG.optimistic_ttl_s,
            first_token_timeout_s=CONFIG.first_token_timeout_s,
        )
        self.twins: dict[str, Twin] = {}
        self.offset_s = survey.offset_s[run.name]
        self.guessed: dict[str, int] = {}  # by replica: number of matches taken from the log
        self._is_damaged = bool(recording.damage)
        self._rings: dict[tuple[str, ...], Ring] = {}
        self._placed: dict[int, Placed] = {}  # by the sending's order
        models = {one.name: line for line in run.lines for decided in line.decisions for one in decided.candidates}
        for name, line in models.items():
            number = survey.sources.get(name)
            source = None if number is None else recording.sources[number]
            if source is not None and not source.model:
                source = replace(source, model=line.base_model or line.model)
            self.twins[name] = Twin(name, self.placement, source, hashes_are_keys=recording.header.redacted)
        self._by_source = {number: self.twins[name] for name, number in survey.sources.items() if name in self.twins}
        self._reports: dict[int, dict[float, Report]] = {}  # by source and time
        for one in run.weighed:
            if one.report is not None and one.name in survey.sources:
                self._reports.setdefault(survey.sources[one.name], {})[one.report.ts] = one.report
        self._records = recording.records()
        self._next = next(self._records, None)

    # ---- facts

    def goes_on(self, fact: Fact) -> None:
        """Apply everything before this fact, and the fact itself; decisions are left to `decide`."""
        self._read_to(fact.at_s + self.offset_s)
        known = {one.name: one for one in fact.decided.candidates} if isinstance(fact, Asked) else {}
        for name, twin in self.twins.items():
            report = known[name].report if name in known else None
            twin.hear(fact.order, fact.at_s, report.ts if report is not None else None)
        self.placement.expire(fact.at_s)
        match fact:
            case Asked():
                for one in fact.decided.candidates:
                    if one.seq is not None:
                        self.twins[one.name].know(one.seq, fact.at_s + self.offset_s, alone=self._is_damaged)
                    self.twins[one.name].see(one, fact.at_s)
            case Sent():
                self._is_sent(fact)
            case Begun(_, at_s, _, sending):
                if (placed := self._placed.get(sending.sent_order)) is not None:
                    self.placement.begun(placed, at_s)
            case Ended(_, at_s, _, sending):
                if (placed := self._placed.pop(sending.sent_order, None)) is not None:
                    self.placement.ended(placed, at_s)

    def _read_to(self, now_s: float) -> None:
        """Give the twins all records up to AHEAD_S after this time of the recorder's clock."""
        while (record := self._next) is not None and record.time <= now_s + AHEAD_S:
            for source, twin in self._by_source.items():
                if record.source == source or record.kind == "session":
                    twin.take(record, self.offset_s, self._reports.get(source, {}))
            self._next = next(self._records, None)

    def _is_sent(self, fact: Sent) -> None:
        one, line = fact.sending, fact.line
        known = (
            side.block_tokens for decided in line.decisions for side in decided.candidates if side.name == one.replica
        )
        has_blocks = line.exact and next(known, APPROXIMATE) == line.block_tokens
        self._placed[one.sent_order] = self.placement.sent_as(
            self.twins[one.replica].load,
            fact.at_s,
            one.uncached_tokens,
            one.streamed,
            one.priority_s,
            line.blocks if has_blocks else [],
            one.awaited_s if has_blocks and line.blocks else 0.0,
            fetched_tokens=one.fetched_tokens,
            stands_back=one.stands_back,
        )

    # ---- decisions

    def decide(self, fact: Asked, policy: str) -> Decision:
        """Decide again with the present code and the logged tie-break seed."""
        decided = fact.decided
        candidates = [self.twins[one.name].candidate for one in decided.candidates]
        names = tuple(one.name for one in candidates)
        ring = self._rings.get(names)
        if ring is None:
            ring = self._rings[names] = Ring(names)
        question = self._question(fact.line, decided)
        return self.placement.decide(question, candidates, ring, policy=policy, seed=decided.lot)

    def _question(self, line: LogLine, decided: Decided) -> Question:
        own = [one for one in decided.candidates if self._is_matched(line, one)]
        slots = {line.block_tokens: sum(1 << self.twins[one.name].candidate.slot for one in own)} if own else {}
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
                slot = self.twins[one.name].candidate.slot
                matched[slot] = one.matched_tokens
                for source, tokens in one.below_tokens().items():
                    below.setdefault(source, {})[slot] = tokens
                if one.readable_tokens:
                    readable[slot] = one.readable_tokens
        question.matched, question.below, question.readable = matched, below, readable
        if decided.is_fetched or decided.source is not None:
            computed = None if decided.source is None else self.twins[decided.source].candidate
            fetch(question, [self.twins[one.name].candidate for one in decided.candidates], computed)
        return question

    def _is_matched(self, line: LogLine, one: Weighed) -> bool:
        """True if its matches are looked up in the index, false if they are taken from the log."""
        has_blocks = line.exact and one.block_tokens != APPROXIMATE and one.block_tokens == line.block_tokens
        return has_blocks and one.seq is not None and self.twins[one.name].is_recorded

    def beside(self, fact: Asked, decision: Decision) -> list[Beside]:
        seqs: list[int | None] = []
        for one in fact.decided.candidates:
            twin = self.twins[one.name]
            looked_up = self._is_matched(fact.line, one)
            seqs.append(twin.last_seq if looked_up else one.seq)
            if not looked_up:
                self.guessed[one.name] = self.guessed.get(one.name, 0) + 1
        return beside(fact.decided, decision, seqs)

    def uncovered(self, fact: Asked, survey: Survey) -> str | None:
        """The reason why the recording does not cover this decision; None if it does."""
        now_s = fact.at_s + self.offset_s
        for one in fact.decided.candidates:
            twin = self.twins[one.name]
            if not twin.is_recorded or one.seq is None:
                continue
            if twin.in_step_s is None or twin.in_step_s > now_s:
                return "before the recording knew a replica's whole cache"
            behind = twin.last_seq != one.seq or (one.report is not None and twin.last_report_ts != one.report.ts)
            if behind and now_s > survey.end_s:
                return "after the recording's end"
            if one.report is not None and twin.last_report_ts is None:
                return "before the recording knew of a replica's load"
            if self._is_damaged and twin.inexact is not None:
                return "in or after a damaged part of the recording"
        return None
