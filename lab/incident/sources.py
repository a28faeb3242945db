"""Which source of a recording is which replica of a log, and how far the clocks of recorder and router are apart.

A status has a time of its own, that of its replica, to the microsecond: where the log and the recording have the same
one, it is the same replica, whatever the two call it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from api.settings import Unusable
from events.native import decode_status
from events.recording import Recording
from events.records import Record
from lab.incident.facts import Run
from router.members.report import Report


class Survey(NamedTuple):
    """What is known of a recording after it was read once."""

    start_s: float
    end_s: float
    records: int
    sources: dict[str, int]  # of replicas, by name
    missing: tuple[str, ...]  # replicas of the log whose events are in no source
    offset_s: dict[str, float]  # by run: the recorder's clock less the router's


def survey(recording: Recording, runs: Sequence[Run], named: Mapping[str, str]) -> Survey:
    """`named`: sources by the replica's name, as they are called in the recording, or by their endpoint."""
    reports = _reports(runs)
    votes: dict[str, Counter[int]] = {}
    apart_s: dict[str, list[float]] = {run.name: [] for run in runs}
    start_s = end_s = recording.header.created
    count = 0
    for count, record in enumerate(recording.records(), start=1):
        start_s, end_s = (record.time, record.time) if count == 1 else (start_s, max(end_s, record.time))
        for run, replica, report in reports.get(status_ts(record), ()) if reports else ():
            votes.setdefault(replica, Counter())[record.source] += 1
            apart_s[run].append(record.time - report.at_s)
    sources = _matched(recording, runs, named, votes)
    followed = {one.name for run in runs for one in run.weighed if one.seq is not None}
    offset_s = {run.name: median(apart_s[run.name]) if apart_s[run.name] else run.zero_s for run in runs}
    return Survey(start_s, end_s, count, sources, tuple(sorted(followed - sources.keys())), offset_s)


def status_ts(record: Record) -> float | None:
    """The replica's own time, of a status."""
    if record.kind != "status":
        return None
    try:
        return decode_status(record.frames[-1]).ts
    except (ValueError, IndexError):
        return None


def _reports(runs: Sequence[Run]) -> dict[float | None, list[tuple[str, str, Report]]]:
    """By the status's time: run, replica and report."""
    known = {(run.name, one.name, one.report) for run in runs for one in run.weighed if one.report is not None}
    found: dict[float | None, list[tuple[str, str, Report]]] = {}
    for run, replica, report in known:
        if report is not None:
            found.setdefault(report.ts, []).append((run, replica, report))
    return found


def _matched(
    recording: Recording, runs: Sequence[Run], named: Mapping[str, str], votes: Mapping[str, Counter[int]]
) -> dict[str, int]:
    """As it was said; by their statuses; by name; and if then one is left of each, they are the same."""
    followed = {one.name for run in runs for one in run.weighed if one.seq is not None}
    found = {replica: _named(recording, replica, text) for replica, text in named.items()}
    for replica, counted in votes.items():
        found.setdefault(replica, counted.most_common(1)[0][0])
    names = [source.name for source in recording.sources]
    for replica in followed - found.keys():
        if replica in names:
            found[replica] = names.index(replica)
    left = followed - found.keys()
    free = set(range(len(names))) - set(found.values())
    if len(left) == len(free) == 1:
        found[left.pop()] = free.pop()
    return found


def _named(recording: Recording, replica: str, text: str) -> int:
    for index, source in enumerate(recording.sources):
        if text in (source.name, source.events):
            return index
    there = ", ".join(f"{source.name} ({source.events})" for source in recording.sources)
    raise Unusable(f"--source {replica}={text}: {recording.path} has no such source; it has {there}")
