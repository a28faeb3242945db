"""The file of usage and of the days' budgets: SQLite, which several workers and routers of one machine may share.

Counts are added to what is there, never set. A COMMIT that fails may have taken effect: the file knows the last batch
of each writer, so that the same one, tried again, is not added twice. All methods block: call them in a thread, from
one thread at a time. They raise `sqlite3.Error` or OSError, and open the file anew after that.
"""

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress

from msgspec import Struct

from router.tenants.limits import Use
from router.tenants.usage import COUNTED, PLACE, Counts, Row, Selection, day_text

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
    budgets: Mapping[tuple[int, str], Use] = {}  # by day and key
    writer: str = ""
    number: int = 0  # of the writer's batches, one after the other


class UsageFile:
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
