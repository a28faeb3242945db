"""Everything that top shows, as lines, and what each key does to it; without a terminal."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from events.tool.words import printable
from router.console.formatting import ago, count, duration, percent, rate, short
from router.console.table import Line, Table
from router.console.top import tables
from router.console.top.poller import DECISIONS, KEY_HINT, REPLICAS, SESSIONS, Poller, Seen
from router.console.top.tables import DIM, STYLES, details_of, state_of
from router.responses import STANDINGS, Recent, ReplicaStatus

STALE = "bold black on yellow"
TITLE = " bold on #3a3a3a"
PATHS = {"replicas": REPLICAS, "events": REPLICAS, "decisions": DECISIONS, "sessions": SESSIONS}  # the tables' paths
OVERVIEW = ("replicas", "decisions")  # shown together
LEAST_LINES = 3  # a table's titles and two rows
EMPTY = {
    REPLICAS: "The router has no replicas yet; add one with `warmroute router --replica`.",
    DECISIONS: "No decisions yet.",
    SESSIONS: "No sessions yet: a policy that weighs costs follows those with long prompts.",
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
HINT = "? help  1-4,0 tables  Tab next  Enter details  / filter  <> sort  q quit"
BACK = "Esc back   up down scroll   q quit"
HELP = """\
 1  replicas          0       replicas and decisions
 2  event streams     Tab     next table
 3  decisions         Enter   details of the row
 4  sessions          Esc     back, or remove the filter

 up down, j k, page up and down, home end: move
 /        show only rows with a text; Enter keeps it
 < >      sort by the next column to the left or right
 r        reverse the order       o  original order
 q        quit                    ?  this help

 Rates are those of the last 5 to 10 seconds. Red: a late
 heartbeat, fewer cached tokens than predicted.
"""


class Screen:
    """The tables, and what lies over them: a `page` of details or help, or a filter that is typed."""

    def __init__(self, poller: Poller) -> None:
        self.tables: dict[str, Table[Any]] = {
            "replicas": tables.replica_table(tables.FIGURES),
            "events": tables.replica_table(tables.STREAMS),
            "decisions": tables.decision_table(),
            "sessions": tables.session_table(),
        }
        self.shown: Sequence[str] = OVERVIEW
        self.ended = False
        self.seen = Seen("")
        self._poller = poller
        self._focused = "replicas"
        self._page: tables.Row | str | None = None  # a row whose details are shown, or a text
        self._scrolled = 0  # lines of the page
        self._typing = False
        self._rows = 0  # lines of the table that keys act on
        self._size = 80, 24

    @property
    def table(self) -> Table[Any]:
        """The table that keys act on."""
        return self.tables[self._focused]

    # ---- drawing

    def lines(self, width: int, height: int) -> list[Line]:
        """Draw what the poller has seen last."""
        if self.seen is not self._poller.seen:
            self.show(self._poller.seen)
        self._size = width, height
        above = heading(self.seen, self._poller.clock())
        room = height - len(above) - 1
        page = self._page
        if page is None:
            middle = self._tables(width, room)
        else:
            if isinstance(page, str):
                details: list[Line] = [[(text, "")] for text in page.splitlines()]
            elif isinstance(page, ReplicaStatus):  # as it is now
                now = [details_of(one) for one in self.seen.replicas if one.name == page.name]
                details = now[0] if now else [[("It is gone.", DIM)]]
            else:
                details = details_of(page)
            self._scrolled = max(0, min(self._scrolled, len(details) - room))
            middle = [[(" ", ""), *line] for line in details[self._scrolled : self._scrolled + max(0, room)]]
        table, below = self.table, [(BACK, DIM)]
        if self._typing:
            below = [("/", "bold"), (f"{table.filter}█", ""), ("  Enter keeps it, Esc drops it", DIM)]
        elif page is None:
            filtered = f"{len(table.shown):,} of {len(table.all):,} with {table.filter!r}  " if table.filter else ""
            below = [(filtered, "bold"), (HINT, DIM)]
        return [*above, *middle, *[[]] * (room - len(middle)), below][:height]

    def show(self, seen: Seen) -> None:
        self.seen = seen
        rows: dict[str, Sequence[Any]] = {
            REPLICAS: seen.replicas,
            DECISIONS: seen.decisions,
            SESSIONS: seen.sessions,
        }
        for name, table in self.tables.items():
            table.show(rows[PATHS[name]])

    def _tables(self, width: int, room: int) -> list[Line]:
        lines: list[Line] = []
        heights = [room]
        if len(self.shown) == 2 and room >= 2 * LEAST_LINES:  # up to half is for the first one
            first = min(1 + max(1, len(self.tables[self.shown[0]].shown)), room // 2)
            heights = [first, room - first]
        for name, height in zip(self.shown, heights, strict=False):
            table, path = self.tables[name], PATHS[name]
            style = DIM if self.seen.is_stale or path in self.seen.refused else ""
            head, *rows = table.lines(width, height, style, focused=table is self.table) or [[]]
            lines += [[(text, own + TITLE) for text, own in head], *rows]
            if not rows:
                rows = [[(text, DIM)] for text in textwrap.wrap(self.empty(name), max(1, width))]
                lines += rows
            lines += [[]] * (height - 1 - len(rows))
            if table is self.table:
                self._rows = height - 1
        return lines

    def empty(self, name: str) -> str:
        """The text of a table without rows."""
        if self.tables[name].all:
            return f"No row has the text {self.tables[name].filter!r}; Esc shows all."
        return self.seen.refused.get(PATHS[name], EMPTY[PATHS[name]])

    # ---- keys

    def press(self, key: str) -> None:
        """Do what a key is for; a letter is its own name."""
        table = self.table
        if self._typing:
            self._typing = key not in ("escape", "enter")
            if key in ("escape", "backspace"):
                table.filter = table.filter[:-1] if key == "backspace" else ""
            elif len(key) == 1:
                table.filter += key
            table.show()
        elif key == "q":
            self.ended = True
        elif self._page is not None:
            if key in ("escape", "enter", "backspace") or (isinstance(self._page, str) and key in "?h"):
                self._page = None
            self._scrolled = max(0, self._scrolled + way(key, self._size[1] - 5))
        else:
            self._act(key)

    def _act(self, key: str) -> None:
        table = self.table
        match key:
            case "1" | "2" | "3" | "4":
                self._focused = list(self.tables)[int(key) - 1]
                self.shown = (self._focused,)
            case "escape" if table.filter:
                table.filter = ""
            case "0" | "escape":
                self.shown = OVERVIEW
                self._focused = self._focused if self._focused in OVERVIEW else OVERVIEW[0]
            case "tab" | "shift+tab":
                names = self.shown
                self._focused = names[names.index(self._focused) - 1]  # there are two at most
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
                table.move_to(table.cursor + way(key, self._rows - 1))
        table.show()


def way(key: str, rows: int) -> int:
    """The rows that a key goes down; a page has `rows`."""
    return STEPS.get(key, 0) + PAGES.get(key, 0) * max(1, rows) + EDGES.get(key, 0) * FAR


# ---- the lines above the tables


def heading(seen: Seen, now_s: float) -> list[Line]:
    """Three lines, the most important figures first: a narrow terminal cuts the rest."""
    replicas = seen.replicas
    first: Line = [(f" {stale_text(seen, now_s)} ", STALE), ("  ", "")] if seen.is_stale else []
    first += [(printable(seen.url), "bold"), (f"  {count(len(replicas), 'replica')}", "")]
    found = Counter(map(state_of, replicas))
    for place, state in enumerate(state for state in reversed(STANDINGS) if found[state]):
        first += [(", " if place else ": ", ""), (f"{found[state]:,} {state}", STYLES.get(state, ""))]

    begun_s = [one.ttft_s for one in seen.decisions if one.ttft_s is not None]
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
        sums = {name: f"{sum(getattr(one, field) for one in streams):,}" for name, field in EVENTS.items()}
        events = joined({"events": f"{rate(total(recent, 'batches_per_s'))}/s", **sums})
    return [first, joined(work), events]


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


def joined(figures: Mapping[str, str]) -> Line:
    line: Line = []
    for name, value in figures.items():
        line += [(f"{'  ' if line else ''}{name} ", ""), (value, "bold")]
    return line
