"""The sources of a recording matched to the replicas of a log, and the clock offset of recorder and router.

Each status carries its replica's own time, to the microsecond. If the log and the recording have a status of the same
time, they mean the same replica, even under different names.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from api.process.settings import Unusable
from events.native import Status, decode_status
from events.recording.recording import Recording
from events.source import Record
from lab.incident.facts import Run
from router.log_lines import Report


class Survey(NamedTuple):
    """Results of one pass over a recording."""

    end_s: float
    sources: dict[str, int]  # replica -> index of its source
    missing: tuple[str, ...]  # replicas of the log whose events are in no source
    offset_s: dict[str, float]  # by run: the recorder's clock minus the router's


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
    """Return a record's status; None for any other record."""
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
    found = {replica: _named(recording, replica, text) for replica, text in named.items()}
    for replica, counted in votes.items():
        found.setdefault(replica, counted.most_common(1)[0][0])
    names = [source.name for source in recording.sources]
    found |= {replica: names.index(replica) for replica in followed - found.keys() if replica in names}
    left, free = followed - found.keys(), set(range(len(names))) - set(found.values())
    if len(left) == len(free) == 1:
        found[left.pop()] = free.pop()
    return found


def _named(recording: Recording, replica: str, text: str) -> int:
    for index, source in enumerate(recording.sources):
        if text in (source.name, source.events):
            return index
    there = ", ".join(f"{source.name} ({source.events})" for source in recording.sources)
    raise Unusable(f"--source {replica}={text}: {recording.path} has no such source; it has {there}")
