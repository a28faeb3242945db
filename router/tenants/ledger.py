"""Usage and budgets of keys: counted in memory by the event loop, saved once a second by a thread.

A file that is locked, broken or full never holds a request up: it is logged once, and tried again. A batch that failed
may be in the file all the same, so it is kept as it is, and written again under its number, which the file knows.
"""

import asyncio
import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain
from time import time
from typing import TypeVar

from router.tenants.charges import Account
from router.tenants.limits import DAY_S, Use, day_number
from router.tenants.shared_limits import SharedLimits
from router.tenants.usage import NO_KEY, Batch, Counts, Row, Selection, Usage, UsageFile, day_of, merged

OTHER = "other"
MAX_KEYS = 2**14  # those that come later are only counted among the others


class KeyTotals:
    """Counters of the keys with most tokens, for metrics: so many have their own, the others have one together.

    A key that comes among the first gets counters that begin at 0, and the others' keep what they have: so none
    ever falls.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens: dict[str, int] = {}  # tokens of all keys since the start
        self._own: dict[str, Counts] = {}
        self._others = Counts()

    def add(self, key: str, counts: Counts) -> None:
        if key in self._tokens or len(self._tokens) < MAX_KEYS:
            self._tokens[key] = self._tokens.get(key, 0) + counts.tokens
            if len(self._own) < self._most:
                self._own.setdefault(key, Counts())
        self._own.get(key, self._others).add(counts)

    def shown(self) -> Iterator[tuple[str, Counts]]:
        """The counters by key, those of the others last."""
        first = nlargest(self._most, self._tokens, key=lambda key: (self._tokens[key], key in self._own))
        self._own = {key: self._own.get(key) or Counts() for key in first}
        for key, counts in self._own.items():
            yield key or NO_KEY, counts
        yield OTHER, self._others


log = logging.getLogger(__name__)

SAVE_S = 1.0
T = TypeVar("T")


@dataclass(eq=False)
class Ledger:
    file: UsageFile | None
    _days: int  # how many of them are kept
    _shared: SharedLimits
    _accounts: Callable[[], Mapping[str, Account]]  # accounts of the keys with limits, by name
    _totals: KeyTotals
    _wall: Callable[[], float] = time

    def __post_init__(self) -> None:
        self.problem: str | None = None  # trouble with the file
        self.since = day_of(self._wall())
        self._fresh = Usage()
        self._unsaved = Usage()
        self._writer = secrets.token_hex(8)
        self._batches = 0
        self._kept: Batch | None = None  # it failed, and may yet be in the file
        self._known: set[str] = set()  # keys whose budgets were read
        self._day: int | None = None  # the day of the last save
        self._saving = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "usage")

    def counts(self, key: str, model: str) -> Counts:
        """The counts of today, to be added to before anything is awaited."""
        place = int(self._wall() // DAY_S), key, model
        return self._fresh.by_place.get(place) or self._fresh.begin(place)

    async def unsaved(self, wanted: Selection) -> list[Row]:
        """The rows that are in no file; without a file, that is all since the start.

        Rows of the moment of the call: a save meanwhile takes none away.
        """
        self._gather()
        found = [self._unsaved.rows] if self._kept is None else [self._kept.rows, self._unsaved.rows]
        rows = chain.from_iterable(each() for each in found)
        return await asyncio.to_thread(lambda: merged(filter(wanted.fits, rows), wanted.by))

    def totals(self) -> list[tuple[str, Counts]]:
        """The counters of keys since the start, for metrics."""
        self._gather()
        return list(self._totals.shown())

    async def saved(self, wanted: Selection, most: int) -> list[Row]:
        """The rows in the file; none while it cannot be read."""
        if self.file is None:
            return []
        file = self.file
        async with self._saving:
            return await self._in_thread(lambda: file.read(wanted, most)) or []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save()

    async def save(self) -> None:
        """Add what is new to the file, and count what others have added there to the budgets.

        Whoever waits for it may be cancelled, as at SIGTERM: what has been taken out is saved all the same.
        """

        async def in_turn() -> None:
            async with self._saving:
                self._gather()
                today = day_number(self._wall())
                if self.file is not None:
                    await self._save(self.file, today)
                    return
                self._shared.touched.clear()
                if self._forgets(today):
                    self._unsaved.forget(today, self._days)
                self._day = today

        await asyncio.shield(asyncio.ensure_future(in_turn()))

    async def close(self) -> None:
        await self.save()
        if self.file is not None:
            self.file.close()
        self._thread.shutdown()

    # ---- parts

    def _forgets(self, today: int) -> bool:
        """Tell whether old days are to go: at the start and at midnight, but not when the clock jumps."""
        return self._day in (None, today - 1)

    def _gather(self) -> None:
        """Count what is fresh in the sums, which a request need not wait for."""
        if self._fresh:
            fresh, self._fresh = self._fresh, Usage()
            for place, counts in fresh.by_place.items():
                self._totals.add(place[1], counts)
                (self._unsaved.by_place.get(place) or self._unsaved.begin(place)).add(counts)

    async def _save(self, file: UsageFile, today: int) -> None:
        if self._kept is not None and not await self._write(file, self._kept):
            return
        usage, self._unsaved = self._unsaved, Usage()
        accounts = self._accounts()
        touched, self._shared.touched = self._shared.touched, set()
        names = {name for name, account in accounts.items() if account.has_days and name not in self._known}
        names |= {name for name in touched if name in accounts and accounts[name].has_days}
        budgets: dict[tuple[int, str], Use] = {}
        for name in names:
            with self._shared.opened(name) as state:
                if any(unsaved := state.take_unsaved()):
                    budgets[state.day, name] = unsaved
        forgets = self._forgets(today)
        if usage or budgets:
            self._batches += 1
            batch = Batch(usage.rows, budgets, self._writer, self._batches)
            if not await self._write(file, batch):
                self._shared.touched |= names
                return
        if not (names or forgets):
            self._day = today
            return

        def forget_and_read() -> dict[str, Use]:  # apart, as what was written must not be written again
            if forgets:
                file.forget(today, self._days)
            return file.budgets(today) if names else {}

        if (found := await self._in_thread(forget_and_read)) is None:
            self._shared.touched |= names
            return
        self._day = today
        for name in names:
            if name in found:
                with self._shared.opened(name) as state:
                    state.turn(self._wall())
                    state.read(today, found[name])
        self._known = (self._known | names) & accounts.keys()

    async def _write(self, file: UsageFile, batch: Batch) -> bool:
        """Write a batch; return False if it has to be written again."""
        is_written = await self._in_thread(lambda: file.write(batch)) is not None
        self._kept = None if is_written else batch
        return is_written

    async def _in_thread(self, work: Callable[[], T]) -> T | None:
        """Run this in the thread; None if the file fails, which is logged once for as long as the reason stays."""
        assert self.file is not None, "its caller has looked"
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            if self.problem != str(error):
                log.error("--usage-db %s: %s; usage is counted in memory until it works", self.file.path, error)
            self.problem = str(error)
            return None
        if self.problem is not None:
            log.info("--usage-db %s works again", self.file.path)
        self.problem = None
        return result
