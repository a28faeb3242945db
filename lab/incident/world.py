"""What one router knew, known again fact by fact: its replicas, its index, what it took for granted."""

from collections.abc import Mapping

from msgspec.structs import replace

from events.recording import Recording
from lab.incident.comparison import Beside, beside
from lab.incident.facts import Asked, Begun, Ended, Fact, Run, Sent
from lab.incident.sources import Survey
from lab.incident.twin import Tape, Twin
from router.placement.cost import Question
from router.placement.decision import Decision
from router.placement.index import PrefixIndex
from router.logged import Decided, Logged, Weighed
from router.placement.tie_break import TieBreak
from router.members import APPROXIMATE
from router.placement.policy import place
from router.report import Report
from router.placement.ring import Ring


class World:
    """Give it the facts of its run in their order; for one that is `Asked` it says what would be decided."""

    def __init__(self, recording: Recording, run: Run, survey: Survey) -> None:
        self.index = PrefixIndex()
        self.twins: dict[str, Twin] = {}
        self.offset_s = survey.offset_s[run.name]
        self.guessed: dict[str, int] = {}  # by replica: matches that are taken from the log
        self._is_damaged = bool(recording.damage)
        self._rings: dict[tuple[str, ...], Ring] = {}
        # What counts as cached, and the number to withdraw it by; by the sending's order.
        self._awaited: dict[int, tuple[list[int], int]] = {}
        self._make_twins(recording, run, survey)
        by_source = {number: self.twins[name] for name, number in survey.sources.items() if name in self.twins}
        self._tape = Tape(recording, by_source, self.offset_s, _reports(run, survey.sources))

    def _make_twins(self, recording: Recording, run: Run, survey: Survey) -> None:
        models = {one.name: line for line in run.lines for decided in line.decisions for one in decided.candidates}
        for name, line in models.items():
            number = survey.sources.get(name)
            source = None if number is None else recording.sources[number]
            if source is not None and not source.model:
                source = replace(source, model=line.base_model or line.model)
            self.twins[name] = Twin(name, self.index, source, hashes_are_keys=recording.header.redacted)

    # ---- facts

    def goes_on(self, fact: Fact) -> None:
        """What has happened before it; and it, but for a decision, which is to be asked for."""
        self._tape.read_to(fact.at_s + self.offset_s)
        known = {one.name: one for one in fact.decided.candidates} if isinstance(fact, Asked) else {}
        for name, twin in self.twins.items():
            report = known[name].report if name in known else None
            twin.hear(fact.order, fact.at_s, report.ts if report is not None else None)
        self.index.optimistic.expire(fact.at_s)
        match fact:
            case Asked():
                self._is_asked(fact)
            case Sent():
                self._is_sent(fact)
            case Begun(_, at_s, _, sending):
                self._awaited.pop(sending.sent_order, None)
                if sending.streamed:
                    self.twins[sending.replica].load.begun(sending.sent_order, at_s)
            case Ended():
                self._is_ended(fact)

    def _is_asked(self, fact: Asked) -> None:
        for one in fact.decided.candidates:
            twin = self.twins[one.name]
            if one.seq is not None:
                twin.know(one.seq, fact.at_s + self.offset_s, alone=self._is_damaged)
            twin.see(one, fact.at_s)

    def _is_sent(self, fact: Sent) -> None:
        one, line = fact.sending, fact.line
        twin = self.twins[one.replica]
        twin.load.sent(one.sent_order, one.uncached_tokens, fact.at_s, streamed=one.streamed, priority_s=one.priority_s)
        if line.exact and line.blocks and _block_tokens(line, one.replica) == line.block_tokens:
            owner = self.index.optimistic.add(twin.candidate.slot, line.blocks, fact.at_s + one.awaited_s)
            self._awaited[one.sent_order] = line.blocks, owner

    def _is_ended(self, fact: Ended) -> None:
        twin = self.twins[fact.sending.replica]
        twin.load.ended(fact.sending.sent_order, fact.at_s)
        if (expected := self._awaited.pop(fact.sending.sent_order, None)) is not None:
            self.index.optimistic.withdraw(twin.candidate.slot, *expected)

    # ---- decisions

    def decide(self, fact: Asked, policy: str) -> Decision:
        """As it would be decided now, with the lot that was drawn then."""
        decided = fact.decided
        candidates = [self.twins[one.name].candidate for one in decided.candidates]
        names = tuple(one.name for one in candidates)
        ring = self._rings.get(names)
        if ring is None:
            ring = self._rings[names] = Ring(names)
        return place(policy, self._question(fact.line, decided), candidates, TieBreak(decided.lot), ring)

    def _question(self, line: Logged, decided: Decided) -> Question:
        matched: dict[int, float] = {}
        lower: dict[int, float] = {}
        awaited: dict[int, float] = {}
        own = [one for one in decided.candidates if self._is_matched(line, one)]
        if own:
            slots = sum(1 << self.twins[one.name].candidate.slot for one in own)
            found = self.index.match(line.blocks, slots)
            matched = {slot: blocks * line.block_tokens for slot, blocks in found.gpu.items()}
            lower = {slot: blocks * line.block_tokens for slot, blocks in found.lower.items()}
            awaited = {
                slot: (blocks - found.sure.get(slot, 0)) * line.block_tokens for slot, blocks in found.gpu.items()
            }
        for one in own:
            slot = self.twins[one.name].candidate.slot
            for claims in (matched, lower, awaited):
                if one.trust != 1 and slot in claims:
                    claims[slot] *= one.trust
        for one in decided.candidates:
            if not self._is_matched(line, one):
                slot = self.twins[one.name].candidate.slot
                matched[slot] = one.matched_tokens
                lower[slot] = one.matched_tokens if one.lower_tokens is None else one.lower_tokens
        return Question(
            tokens=line.prompt_tokens,
            matched=matched,
            lower=matched if lower == matched else lower,
            session=line.session,
            tried=frozenset(decided.tried),
            exact=line.exact,
            turn=decided.turn,
            now_s=decided.at_s,
            came_s=decided.came_s,
            awaited=awaited,
        )

    def _is_matched(self, line: Logged, one: Weighed) -> bool:
        """Whether what it holds of the prompt is looked up, and not taken from the log."""
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
        """Why the recording says too little for this decision."""
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


def _block_tokens(line: Logged, replica: str) -> int:
    sizes = (one.block_tokens for decided in line.decisions for one in decided.candidates if one.name == replica)
    return next(sizes, APPROXIMATE)


def _reports(run: Run, sources: Mapping[str, int]) -> dict[int, dict[float, Report]]:
    found: dict[int, dict[float, Report]] = {}
    for one in run.weighed:
        if one.report is not None and one.name in sources:
            found.setdefault(sources[one.name], {})[one.report.ts] = one.report
    return found
