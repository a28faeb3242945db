"""Usage and budgets of keys: counted in memory by the event loop, saved once a second by a thread.

A file that is locked, broken or full never holds a request up: it is logged once, and tried again.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import time
from typing import TypeVar

from router.tenants.charges import Account
from router.tenants.key_totals import KeyTotals
from router.tenants.limits import DAY_S, Use
from router.tenants.shared_limits import SharedLimits
from router.tenants.usage import Counts, Row, Selection, Usage, day_of, merged
from router.tenants.usage_file import UsageFile

log = logging.getLogger(__name__)

SAVE_S = 1.0
T = TypeVar("T")


class Ledger:
    def __init__(
        self,
        file: UsageFile | None,
        days: int,
        shared: SharedLimits,
        accounts: Callable[[], Mapping[str, Account]],
        totals: KeyTotals,
        wall: Callable[[], float] = time,
    ) -> None:
        """`days`: how many of them are kept. `accounts`: those of the keys with limits, by name."""
        self.file = file
        self._totals = totals
        self.problem: str | None = None  # with the file
        self.since = day_of(wall())
        self._days = days
        self._shared = shared
        self._accounts = accounts
        self._wall = wall
        self._fresh = Usage()
        self._unsaved = Usage()
        self._known: set[str] = set()  # keys whose budgets were read
        self._cleared = 0  # the day when old ones were last forgotten
        self._saving = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "usage")

    def add(self, key: str, model: str, counts: Counts) -> None:
        self._fresh.add(self._wall(), key, model, counts)

    async def unsaved(self, wanted: Selection) -> list[Row]:
        """The rows that are in no file; without a file, that is all since the start.

        Rows of the moment of the call: a save meanwhile takes none away.
        """
        self._gather()
        usage = self._unsaved
        return await asyncio.to_thread(lambda: merged(filter(wanted.fits, usage.rows()), wanted.by))

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
        """Add what is new to the file, and count what others have added there to the budgets."""
        async with self._saving:
            self._gather()
            today = int(self._wall() // DAY_S)
            if self.file is None:
                self._shared.touched.clear()
                if today > self._cleared:
                    self._cleared = today
                    self._unsaved.forget_before(today - self._days + 1)
            else:
                await self._save(self.file, today)

    async def close(self) -> None:
        await self.save()
        if self.file is not None:
            self.file.close()
        self._thread.shutdown()

    # ---- parts

    def _gather(self) -> None:
        """Count what is fresh in the sums, which a request need not wait for."""
        if self._fresh:
            fresh, self._fresh = self._fresh, Usage()
            for row in fresh.rows():
                self._totals.add(row.key, row.counts)
            self._unsaved.add_all(fresh)

    async def _save(self, file: UsageFile, today: int) -> None:
        usage, self._unsaved = self._unsaved, Usage()
        accounts = self._accounts()
        touched, self._shared.touched = self._shared.touched, set()
        names = {name for name, account in accounts.items() if account.has_days and name not in self._known}
        names |= {name for name in touched if name in accounts and accounts[name].has_days}
        budgets = self._unsaved_budgets(names)
        forgets = today > self._cleared
        if not (usage or names or forgets):
            return

        if (usage or budgets) and not await self._in_thread(lambda: file.write(usage.rows(), budgets)):
            self._take_back(usage, budgets)
            self._shared.touched |= names
            return

        def forget_and_read() -> dict[str, Use]:  # apart, as what was written must not be written again
            if forgets:
                file.forget_before(today - self._days + 1)
            return file.budgets(today) if names else {}

        if (found := await self._in_thread(forget_and_read)) is None:
            self._shared.touched |= names
            return
        self._cleared = today
        for name in names:
            if name in found:
                with self._shared.opened(name) as state:
                    state.turn(self._wall())
                    state.read(today, found[name])
        self._known = (self._known | names) & accounts.keys()

    def _unsaved_budgets(self, names: set[str]) -> dict[tuple[int, str], Use]:
        budgets = {}
        for name in names:
            with self._shared.opened(name) as state:
                if any(use := state.take_unsaved()):
                    budgets[state.day, name] = use
        return budgets

    def _take_back(self, usage: Usage, budgets: Mapping[tuple[int, str], Use]) -> None:
        """Keep what could not be saved for the next try."""
        usage.add_all(self._unsaved)
        self._unsaved = usage
        for (day, name), use in budgets.items():
            with self._shared.opened(name) as state:
                if state.day == day:
                    state.saved = state.saved.less(use)

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


def ledger_of(
    path: str | None, days: int, shown_keys: int, shared: SharedLimits, accounts: Callable[[], Mapping[str, Account]]
) -> Ledger:
    """A ledger that keeps usage in this file, or in memory, and has counters for so many keys."""
    file = None if path is None else UsageFile(path)
    return Ledger(file, days, shared, accounts, KeyTotals(shown_keys))
