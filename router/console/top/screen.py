"""Everything that top shows, as lines, and what each key does to it; without a terminal."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from events.tool.words import printable
from router.console.formatting import ago, count, duration, percent, rate, short
from router.console.table import Line, Table
from router.console.top import tables
from router.console.top.details import details_of
from router.console.top.poller import DECISIONS, KEY_HINT, PREFIXES, REPLICAS, Poller, Seen
from router.console.top.tables import BAD, DIM, STYLES, Row, state_of
from router.responses import STANDINGS, Recent, ReplicaStatus

DRAINING = "draining"  # the router's reason if an operator has said so
STALE = "bold black on yellow"
TITLE = " bold on #3a3a3a"
PATHS = {"replicas": REPLICAS, "events": REPLICAS, "prefixes": PREFIXES, "decisions": DECISIONS}  # the tables' paths
OVERVIEW = {"replicas": 5, "prefixes": 3, "decisions": 4}  # shown together, with their shares of the lines
LEAST_LINES = 3  # a table's titles and two rows
EMPTY = {
    REPLICAS: "The router has no replicas yet; add one with `warmroute router --replica`.",
    PREFIXES: "No recent prompts share a prefix.",
    DECISIONS: "No decisions yet.",
}
EVENTS = {  # summed over all streams
    "lag": "lag_batches",
    "gaps": "gaps",
    "lost": "lost_batches",
    "repairs": "repairs",
    "restarts": "restarts",
    "digests differed": "digest_mismatches",
}
STEPS = {"up": -1, "k": -1, "down": 1, "j": 1}
EDGES = {"home": -1, "g": -1, "end": 1, "G": 1}
PAGES = {"pageup": -1, "pagedown": 1}
FAR = 1_000_000
HINT = "? help  1-4,0 tables  Enter details  / filter  <> sort  d drain  q quit"
BACK = "Esc back   up down scroll   q quit"
HELP = """\
 1  replicas          0       overview of three tables
 2  event streams     Tab     next table
 3  hot prefixes      Enter   details of the row
 4  decisions         Esc     back, or remove the filter

 up down, j k, page up and down, home end: move
 /        show only rows with a text; Enter keeps it
 < >      sort by the next column to the left or right
 r        reverse the order       o  original order
 d        drain the replica, or let it serve again
 q        quit                    ?  this help

 Rates are those of the last 5 to 10 seconds. Red: a counter that rose
 in 15, a late heartbeat, fewer cached tokens than predicted.
"""


class Screen:
    """The tables, and what lies over them: a `page` of details or help, a filter that is typed, a question."""

    def __init__(self, poller: Poller) -> None:
        self.tables: dict[str, Table[Any]] = {
            "replicas": tables.replica_table(tables.FIGURES),
            "events": tables.replica_table(tables.STREAMS),
            "prefixes": tables.prefix_table(),
            "decisions": tables.decision_table(),
        }
        self.only: str | None = None  # the table that fills the screen
        self.ended = False
        self.seen = Seen("")
        self._poller = poller
        self._focused = "replicas"
        self._page: Row[Any] | str | None = None  # a row whose details are shown, or a text
        self._scrolled = 0  # lines of the page
        self._typing = False
        self._question: Row[ReplicaStatus] | None = None  # whether to drain it, or to undo that
        self._said = ""  # said until the next key
        self._heights: dict[str, int] = {}  # the heights of the tables that are seen
        self._size = 80, 24

    @property
    def table(self) -> Table[Any]:
        """The table that keys act on."""
        return self.tables[self.only or self._focused]

    @property
    def replica(self) -> Row[ReplicaStatus] | None:
        """The replica that is looked at, as it is now."""
        row = self.table.current if self._page is None else self._page
        wanted = row.key if isinstance(row, Row) and isinstance(row.of, ReplicaStatus) else None
        return next((one for one in self.seen.replicas if one.key == wanted), None)

    # ---- drawing

    def lines(self, width: int, height: int) -> list[Line]:
        """Draw what the poller has seen last."""
        if self.seen is not self._poller.seen:
            self.show(self._poller.seen)
        self._size = width, height
        above, below = heading(self.seen, self._poller.clock()), self._below(width)
        room = height - len(above) - len(below)
        middle = self._tables(width, room) if self._page is None else self._details(self._page, width, room)
        return [*above, *middle, *[[]] * (room - len(middle)), *below][:height]

    def show(self, seen: Seen) -> None:
        self.seen = seen
        rows: tuple[Sequence[Row[Any]], ...] = (seen.replicas, seen.replicas, seen.prefixes, seen.decisions)
        for table, of_table in zip(self.tables.values(), rows, strict=True):
            table.show(of_table)

    def _tables(self, width: int, room: int) -> list[Line]:
        names = list(OVERVIEW) if self.only is None else [self.only]
        wanted = [1 + max(1, len(self.tables[name].shown)) for name in names]
        given = heights(wanted, [OVERVIEW.get(name, 1) for name in names], room)
        self._heights = dict(zip(names, given, strict=False))
        lines: list[Line] = []
        for name, height in self._heights.items():
            table, path = self.tables[name], PATHS[name]
            style = DIM if self.seen.is_stale or path in self.seen.refused else ""
            head, *rows = table.lines(width, height, style, focused=table is self.table) or [[]]
            lines += [[(text, own + TITLE) for text, own in head], *rows]
            if not rows:
                rows = [[(text, DIM)] for text in textwrap.wrap(self.empty(name), max(1, width))]
                lines += rows
            lines += [[]] * (height - 1 - len(rows))
        return lines

    def empty(self, name: str) -> str:
        """The text of a table without rows."""
        if self.tables[name].all:
            return f"No row has the text {self.tables[name].filter!r}; Esc shows all."
        return self.seen.refused.get(PATHS[name], EMPTY[PATHS[name]])

    def _details(self, page: Row[Any] | str, width: int, room: int) -> list[Line]:
        if isinstance(page, str):
            lines: list[Line] = [[(text, "")] for text in page.splitlines()]
        elif isinstance(page.of, ReplicaStatus) and self.replica is None:
            lines = [[("It is gone.", DIM)]]
        else:
            lines = details_of(self.replica or page, max(20, width - 2))
        self._scrolled = max(0, min(self._scrolled, len(lines) - room))
        return [[(" ", ""), *line] for line in lines[self._scrolled : self._scrolled + max(0, room)]]

    def _below(self, width: int) -> list[Line]:
        table = self.table
        if self._question is not None:
            name = printable(self._question.key)
            asked = f"Drain {name}? It gets no new requests, and keeps its cache."
            if self._question.of.why == DRAINING:
                asked = f"Let {name} have requests again?"
            return [[(text, "bold")] for text in textwrap.wrap(f"{asked}  y yes, n no", max(1, width))]
        if self._said:
            return [[(text, "bold")] for text in textwrap.wrap(self._said, max(1, width))]
        if self._typing:
            return [[("/", "bold"), (f"{table.filter}█", ""), ("  Enter keeps it, Esc drops it", DIM)]]
        if self._page is not None:
            return [[(f"{BACK}  d drain" if self.replica is not None else BACK, DIM)]]
        hint: Line = [(HINT, DIM)]
        if table.filter:
            hint.insert(0, (f"{len(table.shown):,} of {len(table.all):,} with {table.filter!r}  ", "bold"))
        return [hint]

    # ---- keys

    def press(self, key: str) -> None:
        """Do what a key is for; a letter is its own name."""
        self._said = ""
        if self._question is not None:
            row, self._question = self._question, None
            if key in ("y", "Y"):
                self._said = self._poller.drain(row.key, undo=row.of.why == DRAINING)
        elif self._typing:
            self._type(key)
        elif key == "q":
            self.ended = True
        elif key == "d" and not isinstance(self._page, str):
            self._question = self.replica
            self._said = "" if self._question else "Choose a replica first: table 1 or 2."
        elif self._page is not None:
            if key in ("escape", "enter", "backspace") or (isinstance(self._page, str) and key in "?h"):
                self._page = None
            self._scrolled = max(0, self._scrolled + self._way(key, self._size[1] - 5))
        else:
            self._act(key)

    @staticmethod
    def _way(key: str, rows: int) -> int:
        """The rows that a key goes down; a page has `rows`."""
        return STEPS.get(key, 0) + PAGES.get(key, 0) * max(1, rows) + EDGES.get(key, 0) * FAR

    def _type(self, key: str) -> None:
        table = self.table
        self._typing = key not in ("escape", "enter")
        if key in ("escape", "backspace"):
            table.filter = table.filter[:-1] if key == "backspace" else ""
        elif len(key) == 1:
            table.filter += key
        table.show()

    def _act(self, key: str) -> None:
        table = self.table
        match key:
            case "0":
                self.only = None
            case "1" | "2" | "3" | "4":
                self.only = list(self.tables)[int(key) - 1]
            case "tab" | "shift+tab":
                names = list(self._heights)
                at = names.index(self._focused) if self._focused in names else 0
                self._focused = names[(at + (1 if key == "tab" else -1)) % len(names)]
            case "escape" if table.filter:
                table.filter = ""
            case "escape":
                self.only = None
            case "enter":
                self._page, self._scrolled = table.current, 0
            case "/":
                self._typing = True
            case "<" | "," | ">" | ".":
                table.sort_by_next(-1 if key in "<," else 1, self._size[0])
            case "r":
                table.reverse = not table.reverse
            case "o":
                table.sorted_by, table.reverse = None, False
            case "?" | "h":
                self._page, self._scrolled = HELP, 0
            case _:
                table.move_to(table.cursor + self._way(key, self._heights.get(self.only or self._focused, 0) - 2))
        table.show()


def heights(wanted: Sequence[int], shares: Sequence[int], room: int) -> list[int]:
    """Lines for each table. Short ones leave theirs to the others; the last ones are hidden where there is no room."""
    wanted = wanted[: max(1, room // LEAST_LINES)]
    given: list[int] = []
    for place, lines in enumerate(wanted[:-1]):
        left, rest = room - sum(given), wanted[place + 1 :]
        share = left * shares[place] // sum(shares[place : len(wanted)])
        given.append(min(lines, max(LEAST_LINES, share), left - LEAST_LINES * len(rest)))
    return [*given, room - sum(given)]


# ---- the lines above the tables


def heading(seen: Seen, now_s: float) -> list[Line]:
    """Three lines, the most important figures first: a narrow terminal cuts the rest."""
    replicas = [row.of for row in seen.replicas]
    first: Line = [(f" {stale_text(seen, now_s)} ", STALE), ("  ", "")] if seen.is_stale else []
    first += [(printable(seen.url), "bold"), (f"  {count(len(replicas), 'replica')}", "")]
    found = Counter(map(state_of, replicas))
    for place, state in enumerate(state for state in reversed(STANDINGS) if found[state]):
        first += [(", " if place else ": ", ""), (f"{found[state]:,} {state}", STYLES.get(state, ""))]

    begun_s = [row.of.ttft_s for row in seen.decisions if row.of.ttft_s is not None]
    recent = [one.recent for one in replicas if one.recent is not None]
    work = {
        "req/s": rate(total(recent, "requests_per_s")),
        "tokens/s": rate(total(recent, "generated_tokens_per_s")),
        "each": duration(mean(recent, "token_s", "generated_tokens_per_s")),
        "prompt/s": rate(total(recent, "prompt_tokens_per_s")),
        "hits": percent(mean(recent, "hit_predicted", "prompt_tokens_per_s")),
        "TTFT": duration(sum(begun_s) / len(begun_s) if begun_s else None),
        "open": short(sum(one.load.in_flight for one in replicas)),
        "waiting": short(sum(one.load.waiting for one in replicas)),
    }
    streams = [one.events for one in replicas if one.events is not None]
    events: Line = [("no event streams" if replicas else "", DIM)]
    if streams:
        risen: frozenset[str] = frozenset().union(*(row.risen for row in seen.replicas))
        alarming = risen - {"repairs"}  # these mend
        sums = ((name, field, sum(getattr(one, field) for one in streams)) for name, field in EVENTS.items())
        figures = ((name, f"{number:,}", BAD if field in alarming else "bold") for name, field, number in sums)
        events = joined([("events", f"{rate(total(recent, 'batches_per_s'))}/s", "bold"), *figures])
    return [first, joined((name, figure, "bold") for name, figure in work.items()), events]


def total(recent: Sequence[Recent], name: str) -> float | None:
    return sum(getattr(one, name) for one in recent) if recent else None


def mean(recent: Sequence[Recent], name: str, weight: str) -> float | None:
    known = [(getattr(one, name), getattr(one, weight)) for one in recent if getattr(one, name) is not None]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole else None


def stale_text(seen: Seen, now_s: float) -> str:
    """Why the figures are stale, and how old they are."""
    old = "" if seen.at_s is None else f", figures {ago(now_s - seen.at_s)} old"
    if seen.silence is not None:
        return f"NO ANSWER{old}: {seen.silence}"
    why, hint, _ = printable(seen.refused[REPLICAS]).partition(f"; see {KEY_HINT}")
    return f"REFUSED{old}{hint}: {why}"  # the hint first, so that it is not cut off


def joined(figures: Iterable[tuple[str, str, str]]) -> Line:
    """Each figure has its name, its value and the value's style."""
    line: Line = []
    for name, value, style in figures:
        line += [(f"{'  ' if line else ''}{name} ", ""), (value, style)]
    return line
