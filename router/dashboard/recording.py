"""A recording of event streams for its page: cached blocks over time, incidents, and the tree at any moment.

No sockets: `recording_server.py` serves it.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import chain, count

from msgspec import Struct

from events.actions import Action
from events.analysis.trunks import Run, Size, all_runs, runs_below, sizes, token_ids
from events.changes import Change, Cleared, Removed, Stored
from events.feed import Feed
from events.messages import EventBatch
from events.recording import Recording, feed_record
from events.records import Record
from events.tool.words import Decode
from events.tree import Node, Tree
from events.view import CacheView
from router.placement.prices import GPU, OWN_SOURCES, source_of
from router.prompts.prefixes.shared import Prefix

BUCKETS = 240
MOST_MARKS = 500  # the first ones; the rest are counted
MOST_PARTS = 300
SHOWN_TOKENS = 128
SHOWN_CHARACTERS = 200
KINDS = {
    "gaps": "gap",
    "lost_batches": "lost",
    "replays": "repair",
    "snapshots": "repair",
    "restarts": "restart",
    "reconnects": "reconnect",
    "digest_mismatches": "mismatch",
}
SESSION = "session"
BY_SPEED = (GPU, *OWN_SOURCES)


class Mark(Struct):
    """An incident of a stream."""

    at: float
    replica: str
    kind: str
    count: int


class Timeline(Struct):
    """Columns of equal length, oldest first; `resident` counts the blocks of each replica."""

    at: list[float]
    stored: list[int]
    removed: list[int]
    resident: dict[str, list[int]]


class RecordingSummary(Struct):
    name: str
    replicas: list[str]
    begin: float
    end: float
    redacted: bool
    texts: bool
    damage: list[str]
    marks: list[Mark]
    more_marks: int
    timeline: Timeline


class ReplicaBlocks(Struct):
    name: str
    blocks: int
    inexact: str | None  # why the count may be wrong


class Moment(Struct):
    at: float
    replicas: list[ReplicaBlocks]
    parts: int  # number of all prefixes; `prefixes` has the largest
    prefixes: list[Prefix]


class ShuttingDown(Exception):
    """The server is shutting down."""


def never() -> bool:
    return False


def records_of(recording: Recording, is_ended: Callable[[], bool]) -> Iterator[Record]:
    """All records; ShuttingDown is raised between two of them, because reading may take minutes."""
    for record in recording.records():
        if is_ended():
            raise ShuttingDown
        yield record


class Player:
    """Replays a recording from its start into a tree."""

    def __init__(
        self,
        recording: Recording,
        heard: Callable[[int, Change], None] | None = None,
        is_ended: Callable[[], bool] = never,
    ) -> None:
        """`heard` is called for every change with the number of its source."""
        self.tree = Tree()
        self._heard = heard
        self._changes: list[Change] = []
        self.views: list[CacheView] = []
        self._feeds: list[Feed] = []
        for number, source in enumerate(recording.sources):
            view = source.view(self._changes.append, self._acted(number))
            self.views.append(view)
            self._feeds.append(Feed(view))
        self._records = records_of(recording, is_ended)
        self._next: Record | None = None
        self.at_s = 0.0

    def play(self, until_s: float) -> None:
        """Play up to a time; for an earlier one, make a new player."""
        for _ in self.steps(until_s):
            pass

    def steps(self, until_s: float) -> Iterator[Record]:
        """Yield each record after it is played."""
        while (record := self._next or next(self._records, None)) is not None:
            self._next = record
            if record.time > until_s:
                return
            self._next = None
            self.at_s = record.time
            feeds = self._feeds if record.kind == SESSION else [self._feeds[record.source]]
            for feed in feeds:
                feed_record(feed, record)
            yield record

    def _acted(self, number: int) -> Callable[[Action, EventBatch | None], None]:
        def acted(_: Action, batch: EventBatch | None) -> None:
            changes = self._changes.copy()
            self._changes.clear()
            if self._heard is not None:
                for change in changes:
                    self._heard(number, change)
            self.tree.apply(self.views[number].name, changes, batch.ts if batch is not None else self.at_s)

        return acted


# ---- over time


def about(recording: Recording, *, texts: bool, is_ended: Callable[[], bool] = never) -> RecordingSummary:
    """Replay the whole recording once; raise ShuttingDown if the server ends."""
    begin_s, end_s = span(recording, is_ended)
    names = [source.name for source in recording.sources]
    marks, more_marks, timeline = _played(recording, names, begin_s, end_s, is_ended)
    return RecordingSummary(
        name=recording.path.name,
        replicas=names,
        begin=begin_s,
        end=end_s,
        redacted=recording.header.redacted,
        texts=texts,
        damage=[str(damage) for damage in recording.damage],
        marks=marks,
        more_marks=more_marks,
        timeline=timeline,
    )


def span(recording: Recording, is_ended: Callable[[], bool] = never) -> tuple[float, float]:
    times = (record.time for record in records_of(recording, is_ended))
    begin_s = next(times, recording.header.created)
    return begin_s, max(chain([begin_s], times))


def _played(
    recording: Recording, names: list[str], begin_s: float, end_s: float, is_ended: Callable[[], bool]
) -> tuple[list[Mark], int, Timeline]:
    counted = [0, 0]  # blocks stored and removed in this bucket

    def heard(_: int, change: Change) -> None:
        if isinstance(change, Stored):
            counted[0] += len(change.keys)
        elif isinstance(change, Removed):
            counted[1] += len(change.keys)
        elif isinstance(change, Cleared):
            counted[1] += sum(len(held.keys) for held in change.held)

    player = Player(recording, heard, is_ended)
    marking = Marking(player.views)
    timeline = Timeline([], [], [], {name: [] for name in names})
    every_s = max((end_s - begin_s) / BUCKETS, 0.001)
    for bucket in range(1, BUCKETS + 1):
        until_s = end_s if bucket == BUCKETS else begin_s + bucket * every_s
        for record in player.steps(until_s):
            marking.look(record)
        timeline.at.append(round(until_s, 3))
        timeline.stored.append(counted[0])
        timeline.removed.append(counted[1])
        counted[:] = 0, 0
        for name, view in zip(names, player.views, strict=True):
            timeline.resident[name].append(view.resolver.digest().blocks)
    return marking.marks, marking.more, timeline


class Marking:
    """Finds incidents by comparing the streams' counters."""

    def __init__(self, views: list[CacheView]) -> None:
        self.marks: list[Mark] = []
        self.more = 0
        self._views = views
        self._before = [dict.fromkeys(KINDS, 0) for _ in views]

    def look(self, record: Record) -> None:
        """Call this after each record is played."""
        if record.kind == SESSION:
            self._mark(Mark(record.time, "", SESSION, 1))
            return
        before, view = self._before[record.source], self._views[record.source]
        stats = view.stream.stats
        for name, kind in KINDS.items():
            now: int = getattr(stats, name)
            # A stream starts with a snapshot or a replay, which is no incident.
            if now > before[name] and not (kind == "repair" and not stats.batches):
                self._mark(Mark(round(record.time, 3), view.name, kind, now - before[name]))
            before[name] = now

    def _mark(self, mark: Mark) -> None:
        if len(self.marks) < MOST_MARKS:
            self.marks.append(mark)
        else:
            self.more += 1


# ---- at a moment


class TreePlayback:
    """The tree at any moment. A later moment continues the last replay."""

    def __init__(self, recording: Recording, decode: Decode | None, is_ended: Callable[[], bool] = never) -> None:
        self._recording = recording
        self._decode = decode
        self._is_ended = is_ended
        self._reached: tuple[float, Player] | None = None

    def at(self, at_s: float) -> Moment:
        """Return the tree at this time; raise ShuttingDown if the server ends."""
        player = self._played(at_s)
        prefixes, parts = parts_of(player.tree, at_s, self._recording.sources[0].model, self._decode)
        held = [ReplicaBlocks(view.name, view.resolver.digest().blocks, view.inexact) for view in player.views]
        return Moment(at=at_s, replicas=held, parts=parts, prefixes=prefixes)

    def _played(self, at_s: float) -> Player:
        reached, self._reached = self._reached, None  # do not continue a replay that failed
        if reached is not None and reached[0] <= at_s:
            player = reached[1]
        else:
            player = Player(self._recording, is_ended=self._is_ended)
        player.play(at_s)
        self._reached = at_s, player
        return player


def parts_of(tree: Tree, at_s: float, model: str, decode: Decode | None) -> tuple[list[Prefix], int]:
    """The prefixes of the largest subtrees, nested, and the number of all prefixes."""
    found = sizes(tree)
    order = count()
    # A subtree is never larger than its parent, so no run comes before its parent.
    pending: list[tuple[int, int, Run, int, dict[str, str] | None, list[Prefix]]] = []
    prefixes: list[Prefix] = []

    def add(below: Node, begin: int, holders: dict[str, str] | None, into: list[Prefix]) -> None:
        for run in runs_below(below, found):
            heapq.heappush(pending, (-found[run.first.key].tokens, next(order), run, begin, holders, into))

    for top in tree.tops():
        add(top, 0, None, prefixes)
    shown = 0
    while pending and shown < MOST_PARTS:
        _, _, run, begin, above, into = heapq.heappop(pending)
        holders = _holders(run, above)
        prefix = _prefix(run, begin, holders, found[run.first.key], at_s, model, decode)
        into.append(prefix)
        shown += 1
        add(run.last, begin + run.tokens, holders, prefix.below)
    return prefixes, sum(1 for _ in all_runs(tree))


def _holders(run: Run, above: dict[str, str] | None) -> dict[str, str]:
    """The replicas that hold the run and all before it, with the slowest source that this takes."""
    found: dict[str, str] = {}
    for holder in run.held:
        source = source_of(holder.medium.partition("/")[0])  # without the group
        found[holder.replica] = min(source, found.get(holder.replica, source), key=BY_SPEED.index)
    if above is None:
        return found
    return {name: max(source, above[name], key=BY_SPEED.index) for name, source in found.items() if name in above}


def _prefix(
    run: Run, begin: int, holders: dict[str, str], size: Size, at_s: float, model: str, decode: Decode | None
) -> Prefix:
    return Prefix(
        model=model,
        exact=True,
        begin=begin,
        tokens=run.tokens,
        prompts=size.leaves,
        idle_s=round(max(0.0, at_s - max(node.last_event_s for node in run.nodes)), 3),
        held_by=len(holders),
        replicas=sorted(holders),
        text=_text(run, decode),
        below=[],
        id=f"{run.first.key:016x}",
        sources={name: source for name, source in holders.items() if source != GPU},
    )


def _text(run: Run, decode: Decode | None) -> str | None:
    if decode is None or not run.packed:
        return None
    return decode(list(token_ids(run.packed[: 4 * SHOWN_TOKENS])))[:SHOWN_CHARACTERS]
