"""Usage and budgets are saved once a second, survive a restart, and wait in memory while the file fails."""

import asyncio
import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from api.errors import ApiError
from router.tenants.charges import Account, account_of
from router.tenants.keys import Key, digest_of
from router.tenants.ledger import KeyTotals, Ledger
from router.tenants.limits import DAY_S, Use
from router.tenants.shared_limits import SharedLimits
from router.tenants.usage import COUNTED, OTHERS, Counts, Row, Selection, Usage, UsageFile

ALL = Selection("0000-01-01", "9999-12-31")
NOON_S = 20_000.5 * DAY_S
TODAY = "2024-10-04"
KEY = Key(name="a", digest=digest_of("a"), requests_per_day=3, tokens_per_day=1000)


class Router:
    """As much of a router as counts: the limits of its key, and its ledger."""

    def __init__(
        self, path: Path | None, days: int = 90, shared: SharedLimits | None = None, connect: Any = sqlite3.connect
    ) -> None:
        self.wall_s = NOON_S
        self.shared = shared or SharedLimits()
        found = account_of(KEY, self.shared, lambda: self.wall_s)
        assert found is not None
        self.account: Account = found
        file = None if path is None else UsageFile(str(path), connect)
        clock: Callable[[], float] = lambda: self.wall_s  # noqa: E731
        self.ledger = Ledger(file, days, self.shared, lambda: {"a": self.account}, KeyTotals(20), clock)

    def used(self) -> Use:
        with self.shared.opened("a") as state:
            return state.today

    def problem(self) -> str | None:
        return self.ledger.problem

    def use(self, file: UsageFile) -> None:
        assert self.ledger.file is not None, "it has one already"
        self.ledger.file.close()
        self.ledger.file = file

    async def rows(self) -> list[Row]:
        return [*await self.ledger.saved(ALL, 100), *await self.ledger.unsaved(ALL)]


@asynccontextmanager
async def router(
    path: Path | None, days: int = 90, shared: SharedLimits | None = None, connect: Any = sqlite3.connect
) -> AsyncIterator[Router]:
    made = Router(path, days, shared, connect)
    await made.ledger.save()
    try:
        yield made
    finally:
        await made.ledger.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


async def test_usage_and_budgets_outlive_the_router(path: Path) -> None:
    async with router(path) as one:
        one.account.admit(0.0).take_prompt(Use(computed=300, cached=100), 0.0)
        one.ledger.counts("a", "m").add(Counts(1, computed_tokens=300))
        await one.ledger.save()
        one.account.admit(0.0)
        one.ledger.counts("a", "m").add(Counts(1, computed_tokens=5))
        # It is killed here: what is younger than the last save is lost.
        again = Router(path)
        await again.ledger.save()
        assert again.used() == Use(1, 300, 100, 0)
        assert await again.rows() == [Row(TODAY, "a", "m", Counts(1, computed_tokens=300))]
        await again.ledger.close()
    async with router(path) as last:  # which has ended as it should
        assert last.used() == Use(2, 300, 100, 0)
        last.account.admit(0.0)
        with pytest.raises(ApiError, match="requests_per_day"):
            last.account.admit(0.0)
        assert (await last.rows())[0].counts.requests == 2


async def test_routers_that_share_the_file_share_the_days_budget(path: Path) -> None:
    async with router(path) as one, router(path) as two:
        one.account.admit(0.0)
        two.account.admit(0.0)
        two.account.admit(0.0)
        for each in (one, two, one):
            with each.shared.opened("a"):  # as each request does
                pass
            await each.ledger.save()
        assert (one.used().requests, two.used().requests) == (3, 3)
        for each in (one, two, one, two):
            with each.shared.opened("a"):  # as each request does
                pass
            await each.ledger.save()
        assert (one.used().requests, two.used().requests) == (3, 3)


async def test_workers_of_one_router_count_once(path: Path) -> None:
    shared = SharedLimits(2)
    async with router(path, shared=shared) as one, router(path, shared=shared) as two:
        for each in (one, two):
            each.account.admit(0.0)
        for each in (one, two, one, two):
            await each.ledger.save()
        assert one.used().requests == 2
    async with router(path) as after:
        assert after.used().requests == 2


async def test_a_new_day_has_a_new_budget_and_forgets_the_oldest(path: Path) -> None:
    async with router(path, days=2) as one:
        for day in range(4):
            one.wall_s = NOON_S + day * DAY_S
            one.account.admit(0.0)
            one.ledger.counts("", "m").add(Counts(1))
            await one.ledger.save()
            assert one.used().requests == 1
        assert [row.day for row in await one.rows()] == ["2024-10-05", "2024-10-06", "2024-10-07"]


async def test_while_the_file_is_broken_nothing_is_lost_and_one_line_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(b"no database" * 100)
    async with router(path) as one:
        for _ in range(3):
            one.account.admit(0.0)
            one.ledger.counts("a", "m").add(Counts(1, generated_tokens=2))
            await one.ledger.save()
        expected = [Row(TODAY, "a", "m", Counts(3, generated_tokens=6))]
        assert one.problem() is not None
        assert await one.rows() == expected
        assert len([line for line in caplog.records if line.levelno == logging.ERROR]) == 1
        path.unlink()
        await one.ledger.save()
        assert one.problem() is None
        assert await one.ledger.unsaved(ALL) == []
        assert await one.rows() == expected
        assert one.used().requests == 3
    async with router(path) as after:
        assert after.used().requests == 3


async def test_what_was_written_is_not_written_again_if_only_reading_fails(path: Path) -> None:
    class Unreadable(UsageFile):
        fails = True

        def budgets(self, day: int) -> dict[str, Use]:
            if self.fails:
                raise sqlite3.OperationalError("disk I/O error")
            return super().budgets(day)

    async with router(path) as one:
        one.use(file := Unreadable(str(path)))
        one.account.admit(0.0)
        one.ledger.counts("a", "m").add(Counts(1))
        for fails in (True, True, False):
            file.fails = fails
            await one.ledger.save()
        assert (await one.rows())[0].counts.requests == one.used().requests == 1
    async with router(path) as after:
        assert after.used().requests == 1


# ---- a clock that jumps


def allowed(one: Router) -> int:
    """Requests that are let in until the day's budget is used up."""
    for count in range(10):
        try:
            one.account.admit(0.0)
        except ApiError:
            return count
    raise AssertionError("there is no limit")


@given(st.lists(st.integers(-400, 400), min_size=1, max_size=12))
async def test_wherever_the_clock_goes_each_day_has_its_own_budget_and_history(jumps: list[int]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "usage.db"
        async with router(path) as one:
            used: Counter[float] = Counter()
            for jump in jumps:
                one.wall_s = NOON_S + jump * DAY_S
                with one.shared.opened("a") as state:
                    state.turn(one.wall_s)
                await one.ledger.save()
                assert one.used().requests == used[jump]
                used[jump] += allowed(one)
                assert used[jump] == 3
                one.ledger.counts("a", "m").add(Counts(1))
                await one.ledger.save()
            assert sum(row.counts.requests for row in await one.rows()) == len(jumps)
        async with router(path) as again:
            again.wall_s = one.wall_s
            await again.ledger.save()
            with again.shared.opened("a") as state:
                state.turn(again.wall_s)
            await again.ledger.save()
            assert allowed(again) == 0


# ---- a database that fails


class Faulty:
    """A connection whose COMMITs do what a test wants; all else goes to SQLite."""

    def __init__(self, connection: sqlite3.Connection, faults: "Faults") -> None:
        self._connection, self._faults = connection, faults

    def execute(self, sql: str, *arguments: Any) -> Any:
        if sql != "COMMIT" or not self._connection.in_transaction or self._faults.are_over:
            return self._connection.execute(sql, *arguments)
        return self._faults.commit(self._connection)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Faults:
    """Faults of the next COMMITs: it fails, takes effect and fails, or is slow; then there are none."""

    def __init__(self, *faults: str) -> None:
        self._faults = list(faults)
        self.is_slow, self.goes_on = threading.Event(), threading.Event()

    @property
    def are_over(self) -> bool:
        return not self._faults

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return Faulty(sqlite3.connect(*arguments, **options), self)

    def commit(self, connection: sqlite3.Connection) -> Any:
        fault = self._faults.pop(0)
        if "slow" in fault:
            self.is_slow.set()
            assert self.goes_on.wait(10.0)
        if "lost" not in fault:
            connection.execute("COMMIT")
        if "fails" in fault:
            raise sqlite3.OperationalError("disk I/O error")


async def count(one: Router, requests: int) -> None:
    for _ in range(requests):
        one.account.admit(0.0)
        one.ledger.counts("a", "m").add(Counts(1, generated_tokens=2))


async def saved_in(path: Path) -> tuple[int, int]:
    """The requests of the usage and of the budget in the file."""
    async with router(path) as after:
        rows = await after.ledger.saved(ALL, 10)
        return sum(row.counts.requests for row in rows), after.used().requests


@pytest.mark.parametrize(
    "faults",
    [["fails"], ["lost, fails"], ["fails", "fails"], ["fails", "lost, fails", "fails"], ["lost, fails", "fails"]],
    ids=str,
)
async def test_a_commit_that_fails_after_it_took_effect_is_not_written_twice(path: Path, faults: list[str]) -> None:
    async with router(path) as one:
        one.use(UsageFile(str(path), found := Faults(*faults)))
        await count(one, 1)
        await one.ledger.save()
        await count(one, 1)
        while not found.are_over:
            await one.ledger.save()
            await count(one, 0)
        await one.ledger.save()
        assert await one.ledger.unsaved(ALL) == [] and one.problem() is None
    assert await saved_in(path) == (2, 2)


@pytest.mark.parametrize("then", ["", "fails", "lost, fails"])
async def test_a_save_that_is_cancelled_loses_nothing_and_writes_nothing_twice(path: Path, then: str) -> None:
    async with router(path) as one:
        one.use(UsageFile(str(path), found := Faults(f"slow, {then}")))
        await count(one, 1)
        saving = asyncio.create_task(one.ledger.save())
        await asyncio.to_thread(found.is_slow.wait, 10.0)
        await count(one, 1)
        saving.cancel()  # as SIGTERM has it
        with pytest.raises(asyncio.CancelledError):
            await saving
        found.goes_on.set()
    assert await saved_in(path) == (2, 2)


async def test_without_a_file_usage_is_kept_since_the_start() -> None:
    async with router(None, days=2) as one:
        for day in (0, 1, 2, 3, 500):
            one.wall_s = NOON_S + day * DAY_S
            await one.ledger.save()
            one.ledger.counts("", "m").add(Counts(1))
            await one.ledger.save()
        assert [row.day for row in await one.rows()] == ["2024-10-05", "2024-10-06", "2024-10-07", "2026-02-16"]


def test_rows_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.tenants.usage.MAX_ROWS", 3)
    usage = Usage()
    for number in range(10):
        usage.begin((20_000, f"key-{number}", "m")).add(Counts(1))
    rows = list(usage.rows())
    assert len(rows) == 4 and rows[-1] == Row(TODAY, OTHERS, OTHERS, Counts(7))


# ---- metrics


def test_the_keys_with_most_tokens_have_counters_and_no_counter_ever_falls() -> None:
    totals, before = KeyTotals(2), dict[str, int]()
    for number in range(40):
        totals.add(f"key-{number % 7}", Counts(1, generated_tokens=number % 7))
        shown = {key: counts.generated_tokens for key, counts in totals.shown()}
        assert list(shown)[-1] == "other" and len(shown) <= 3
        for key, tokens in shown.items():
            assert tokens >= before.get(key, 0) or key != "other"
        before = shown
    assert set(before) == {"key-6", "key-5", "other"}


def test_clients_without_a_key_are_shown_as_none() -> None:
    totals = KeyTotals(2)
    totals.add("", Counts(1))
    assert [key for key, _ in totals.shown()] == ["(none)", "other"]


def test_all_counts_are_added() -> None:
    counts = Counts(*range(1, len(COUNTED) + 1))
    counts.add(Counts(*range(10, len(COUNTED) + 10)))
    assert list(astuple(counts)) == [11 + 2 * place for place in range(len(COUNTED))]
