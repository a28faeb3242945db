"""Usage by day, key and model: what is counted, the counts since the last time that they were saved, and their file."""

import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, date, datetime, timedelta

from msgspec import Struct
from msgspec.structs import astuple

from router.placement.classes import ServiceClass
from router.tenants.limits import Use

MAX_ROWS = 50_000  # rows in memory; more are counted as one row of the day
NO_KEY = "(none)"  # clients without a key
OTHERS = "(others)"
EPOCH = date(1970, 1, 1)
PLACE = ("day", "key", "model")  # the fields of a row


class Counts(Struct):
    requests: int = 0
    client_errors: int = 0  # answered with a status of 400 to 499
    server_errors: int = 0  # answered with 500 and above, or broken off
    computed_tokens: int = 0  # prompts' tokens
    cached_tokens: int = 0  # prompts' tokens
    generated_tokens: int = 0
    first_tokens: int = 0  # requests of which the first token came
    first_token_s: float = 0.0  # the times until it came, added up
    saved_s: float = 0.0  # seconds of prefill saved by the cache

    def add(self, other: "Counts") -> None:
        """Add each of the counts."""
        self.requests += other.requests
        self.client_errors += other.client_errors
        self.server_errors += other.server_errors
        self.computed_tokens += other.computed_tokens
        self.cached_tokens += other.cached_tokens
        self.generated_tokens += other.generated_tokens
        self.first_tokens += other.first_tokens
        self.first_token_s += other.first_token_s
        self.saved_s += other.saved_s

    @property
    def tokens(self) -> int:
        return self.computed_tokens + self.cached_tokens + self.generated_tokens


COUNTED = Counts.__struct_fields__


class Row(Struct):
    day: str  # 2026-01-31, UTC
    key: str
    model: str
    counts: Counts

    @property
    def values(self) -> tuple[object, ...]:
        return (self.day, self.key, self.model, *astuple(self.counts))


class Selection(Struct, frozen=True):
    """Rows from one day to another, both included; None: of all keys or models."""

    first: str
    last: str
    key: str | None = None
    model: str | None = None
    by: tuple[str, ...] = PLACE  # a row for each of these, summed over the others

    def fits(self, row: Row) -> bool:
        return self.first <= row.day <= self.last and self.key in (None, row.key) and self.model in (None, row.model)


class Usage:
    """Counts by day, key and model. Models are those that are served, so there are few; keys are those of the file."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[int, str, str], Counts] = {}

    def __bool__(self) -> bool:
        return bool(self.by_place)

    def begin(self, place: tuple[int, str, str]) -> Counts:
        if len(self.by_place) >= MAX_ROWS:
            place = (place[0], OTHERS, OTHERS)
        return self.by_place.setdefault(place, Counts())

    def forget(self, today: int, days: int) -> None:
        """Forget the days that are older than so many, of which as many later ones are known, as the file does."""
        over = sorted({day for day, _, _ in self.by_place if day < today})
        kept = min(today - days + 1, over[-days]) if len(over) > days else 0
        for place in [place for place in self.by_place if place[0] < kept]:
            del self.by_place[place]

    def rows(self) -> Iterator[Row]:
        for (day, key, model), counts in list(self.by_place.items()):  # others may count meanwhile
            yield Row(day_text(day), key, model, counts)


def merged(rows: Iterable[Row], by: Collection[str] = PLACE) -> list[Row]:
    """Return one row for each day, key and model, in this order. Those that `by` does not name are empty."""
    by_day, by_key, by_model = (name in by for name in PLACE)
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        place = row.day if by_day else "", row.key if by_key else "", row.model if by_model else ""
        if place in found:
            found[place].counts.add(row.counts)
        else:
            found[place] = Row(*place, Counts(*astuple(row.counts)))
    for row in found.values():  # rounding takes the noise of sums of floats
        row.counts.first_token_s = round(row.counts.first_token_s, 6)
        row.counts.saved_s = round(row.counts.saved_s, 6)
    return [found[place] for place in sorted(found)]


def day_text(day: int) -> str:
    """The date of a day that is counted from 1970."""
    return (EPOCH + timedelta(days=day)).isoformat()


def day_of(wall_s: float) -> date:
    return datetime.fromtimestamp(wall_s, UTC).date()


# ---- classes of service


class ClassCounts(Struct):
    answered: int = 0  # requests whose first token came
    late: int = 0  # those among them whose first token came later than the class wants
    refused: int = 0  # refused because they could not be served in time


class ClassTotals:
    def __init__(self) -> None:
        self.by_name: dict[str, ClassCounts] = {}  # empty while there are no classes

    def answered(self, service: ServiceClass, first_token_s: float) -> None:
        counts = self.by_name.setdefault(service.name, ClassCounts())
        counts.answered += 1
        counts.late += first_token_s > service.first_token_s

    def refused(self, service: ServiceClass) -> None:
        self.by_name.setdefault(service.name, ClassCounts()).refused += 1


# ---- the file of usage and of the days' budgets: SQLite, which several workers and routers of one machine may share
#
# Counts are added to what is there, never set. A COMMIT that fails may have taken effect: the file knows the last batch
# of each writer, so that the same one, tried again, is not added twice.

VERSION = 1
LOCKED_S = 1.0  # how long to wait for another process
BUDGETED = Use._fields

_TABLES = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, key TEXT, model TEXT, {", ".join(f"{name} NOT NULL DEFAULT 0" for name in COUNTED)},
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS budgets (
    day TEXT, key TEXT, {", ".join(f"{name} NOT NULL DEFAULT 0" for name in BUDGETED)}, PRIMARY KEY (day, key)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
"""
# Older files of this version have none, and older routers need none.
_BATCHES = "CREATE TABLE IF NOT EXISTS batches (writer TEXT PRIMARY KEY, number, day TEXT) WITHOUT ROWID"
_LAST_BATCH = "SELECT number FROM batches WHERE writer = ?"
_NOTE_BATCH = "INSERT OR REPLACE INTO batches VALUES (?, ?, date('now'))"
# A day goes once it is too old and so many later ones are over, so that a clock which jumps ahead deletes nothing.
_FORGET = (
    "DELETE FROM {table} WHERE day < ?1 AND day < "
    "(SELECT day FROM (SELECT DISTINCT day FROM {table} WHERE day < ?2 ORDER BY day DESC LIMIT 1 OFFSET ?3))"
)


def _adding(table: str, place: tuple[str, ...], counted: tuple[str, ...]) -> str:
    names = (*place, *counted)
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in counted)
    return (
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
        f"ON CONFLICT DO UPDATE SET {sums}"
    )


_ADD_USAGE = _adding("usage", PLACE, COUNTED)
_ADD_BUDGET = _adding("budgets", ("day", "key"), BUDGETED)
_SELECT_BUDGETS = f"SELECT key, {', '.join(BUDGETED)} FROM budgets WHERE day = ?"


def prepare(path: str) -> None:
    """Make the file if it is not there. One that cannot be used is for the first save to complain about."""
    with suppress(sqlite3.Error, OSError):
        file = UsageFile(path)
        file.connection()
        file.close()


class Batch(Struct, frozen=True):
    """Counts to add, all or none."""

    rows: Callable[[], Iterable[Row]]
    budgets: Mapping[tuple[int, str], Use] = {}  # the used budgets by day and key
    writer: str = ""
    number: int = 0  # the writer numbers its batches


class UsageFile:
    """All methods block: call them in a thread, from one thread at a time.

    They raise `sqlite3.Error` or OSError, and open the file anew after that.
    """

    def __init__(self, path: str, connect: Callable[..., sqlite3.Connection] = sqlite3.connect) -> None:
        self.path = path
        self._connect = connect
        self._open: sqlite3.Connection | None = None

    def write(self, batch: Batch) -> bool:
        """Add a batch's counts, unless the writer's last batch here is this one; return whether they were added."""
        with self._transaction() as connection:
            if connection.execute(_LAST_BATCH, (batch.writer,)).fetchone() == (batch.number,):
                return False
            connection.executemany(_ADD_USAGE, [row.values for row in batch.rows()])
            budgets = [(day_text(day), key, *use) for (day, key), use in batch.budgets.items()]
            connection.executemany(_ADD_BUDGET, budgets)
            connection.execute(_NOTE_BATCH, (batch.writer, batch.number))
        return True

    def budgets(self, day: int) -> dict[str, Use]:
        """The amounts that each key has used of its budgets on this day."""
        with self._transaction("BEGIN") as connection:
            found = connection.execute(_SELECT_BUDGETS, (day_text(day),))
            return {key: Use(*counts) for key, *counts in found}

    def read(self, wanted: Selection, most: int) -> list[Row]:
        place = ", ".join(name if name in wanted.by else "''" for name in PLACE)
        sums = ", ".join(f"sum({name})" for name in COUNTED)
        select = (
            f"SELECT {place}, {sums} FROM usage WHERE day BETWEEN ?1 AND ?2 "
            "AND (?3 IS NULL OR key = ?3) AND (?4 IS NULL OR model = ?4) GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LIMIT ?5"
        )
        with self._transaction("BEGIN") as connection:
            found = connection.execute(select, (wanted.first, wanted.last, wanted.key, wanted.model, most))
            return [Row(day, key, model, Counts(*counts)) for day, key, model, *counts in found]

    def forget(self, today: int, days: int) -> None:
        """Delete the days that are older than so many, of which as many later ones are in the file."""
        with self._transaction() as connection:
            for table in ("usage", "budgets"):
                connection.execute(_FORGET.format(table=table), (day_text(today - days + 1), day_text(today), days - 1))
            connection.execute("DELETE FROM batches WHERE day < ?", (day_text(today - days),))

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Begin and commit; after an error the file is closed, and opened anew next time: it may have been replaced."""
        try:
            connection = self.connection()
            connection.execute(begin)
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def connection(self) -> sqlite3.Connection:
        if self._open is None:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))  # names and numbers of tenants: for this user
            made = self._connect(self.path, timeout=LOCKED_S, isolation_level=None, check_same_thread=False)
            try:
                made.execute("PRAGMA journal_mode = WAL")
                made.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the last second
                with closing(made.execute("PRAGMA user_version")) as found:
                    [version] = found.fetchone()
                if version not in (0, VERSION):
                    written = f"{self.path} was written by a newer version of warmroute ({version})"
                    raise sqlite3.DatabaseError(f"{written}; use another file")
                if not version:
                    made.executescript(_TABLES)
                made.execute(_BATCHES)
            except BaseException:
                made.close()
                raise
            self._open = made
        return self._open
