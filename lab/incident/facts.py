"""The router's actions from a request log, in their original order; and the sources of a recording that belong to it.

Each status carries its replica's own time, to the microsecond. If the log and the recording have a status of the same
time, they mean the same replica, even under different names; so the clocks of recorder and router are compared, too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from api.process.settings import Unusable
from events.native import Status, decode_status
from events.recording.recording import Recording
from events.source import Record
from router.log_lines import Decided, LogLine, Report, Sending, Weighed


class Fact(NamedTuple):
    """The router looked for a replica (a decision), or a request went there, began or ended (a sending)."""

    order: int
    at_s: float
    line: LogLine
    of: Decided | Sending
    kind: Literal["asked", "sent", "begun", "ended"]


class Run(NamedTuple):
    name: str
    lines: Sequence[LogLine]
    facts: Sequence[Fact]  # sorted as the router has counted

    @property
    def weighed(self) -> Iterable[Weighed]:
        return (one for line in self.lines for decided in line.decisions for one in decided.candidates)

    @property
    def zero_s(self) -> float:
        """The wall-clock time at 0 of the router's clock: a median over its lines, as wall clocks are corrected."""
        zeros = sorted(line.ts - line.at_s for line in self.lines)
        return zeros[len(zeros) // 2]


def runs_of(lines: Iterable[LogLine]) -> list[Run]:
    """Runs in the order of their start; lines without decisions come from other writers and are left out."""
    by_name: dict[str, list[LogLine]] = {}
    for line in lines:
        if line.decisions:
            by_name.setdefault(line.run, []).append(line)
    found = [
        Run(name, own, sorted((fact for line in own for fact in facts_of(line)), key=lambda fact: fact.order))
        for name, own in by_name.items()
    ]
    return sorted(found, key=lambda run: run.zero_s + run.facts[0].at_s)


def facts_of(line: LogLine) -> Iterable[Fact]:
    for decided in line.decisions:
        yield Fact(decided.order, decided.at_s, line, decided, "asked")
    for one in line.sendings:
        yield Fact(one.sent_order, one.sent_at_s, line, one, "sent")
        if one.begun_order >= 0:
            yield Fact(one.begun_order, one.begun_at_s, line, one, "begun")
        if one.ended_order >= 0:
            yield Fact(one.ended_order, one.ended_at_s, line, one, "ended")


class Survey(NamedTuple):
    end_s: float
    sources: dict[str, int]  # replica -> index of its source
    missing: tuple[str, ...]  # replicas of the log whose events are in no source
    offset_s: dict[str, float]  # the recorder's clock minus the router's, for each run


def survey(recording: Recording, runs: Sequence[Run], named: Mapping[str, str]) -> Survey:
    """Read the recording once. `named`: by replica, the name or endpoint of its source."""
    reports: dict[float, set[tuple[str, str, Report]]] = {}  # runs, replicas and reports by the time of the status
    for run in runs:
        for one in run.weighed:
            if one.report is not None:
                reports.setdefault(one.report.ts, set()).add((run.name, one.name, one.report))
    votes: dict[str, Counter[int]] = {}
    apart_s: dict[str, list[float]] = {run.name: [] for run in runs}
    end_s: float | None = None
    for record in recording.records():
        end_s = record.time if end_s is None else max(end_s, record.time)
        status = status_of(record) if reports else None
        for name, replica, report in reports.get(status.ts, ()) if status is not None else ():
            votes.setdefault(replica, Counter())[record.source] += 1
            apart_s[name].append(record.time - report.at_s)
    followed = {one.name for run in runs for one in run.weighed if one.seq is not None}
    sources = _matched(recording, followed, named, votes)
    offset_s = {run.name: median(apart_s[run.name]) if apart_s[run.name] else run.zero_s for run in runs}
    end_s = recording.header.created if end_s is None else end_s
    return Survey(end_s, sources, tuple(sorted(followed - sources.keys())), offset_s)


def status_of(record: Record) -> Status | None:
    if record.kind != "status":
        return None
    try:
        return decode_status(record.frames[-1])
    except (ValueError, IndexError):
        return None


def _matched(
    recording: Recording, followed: set[str], named: Mapping[str, str], votes: Mapping[str, Counter[int]]
) -> dict[str, int]:
    """Match replicas to sources: as `named`, by statuses, by name, and at last the only two left to each other."""
    found: dict[str, int] = {}
    for replica, text in named.items():
        matching = [at for at, source in enumerate(recording.sources) if text in (source.name, source.events)]
        if not matching:
            there = ", ".join(f"{source.name} ({source.events})" for source in recording.sources)
            raise Unusable(f"--source {replica}={text}: {recording.path} has no such source; it has {there}")
        found[replica] = matching[0]
    for replica, counted in votes.items():
        found.setdefault(replica, counted.most_common(1)[0][0])
    names = [source.name for source in recording.sources]
    found |= {replica: names.index(replica) for replica in followed - found.keys() if replica in names}
    left, free = followed - found.keys(), set(range(len(names))) - set(found.values())
    if len(left) == len(free) == 1:
        found[left.pop()] = free.pop()
    return found
