"""The file of usage: counts are added by whoever shares it, and a file that fails is tried again."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.tenants.limits import Use
from router.tenants.usage import Batch, Counts, Row, Selection, UsageFile, day_text, merged

ALL = Selection("0000-01-01", "9999-12-31")
DAY = 20_000
NUMBERS = count(1)
ROW = Row("2024-10-04", "a", "m", Counts(requests=1, computed_tokens=10, first_token_s=0.5))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "usage.db")


def write(file: UsageFile, rows: list[Row], budgets: dict[tuple[int, str], Use] | None = None) -> None:
    file.write(Batch(lambda: rows, budgets or {}, "w", next(NUMBERS)))


def opened(path: str, connect: Callable[..., sqlite3.Connection] = sqlite3.connect) -> Any:
    return closing(UsageFile(path, connect))


def test_counts_of_several_that_share_it_are_added(path: str) -> None:
    with opened(path) as one, opened(path) as two:
        for file in (one, two, one):
            write(file, [ROW, Row("2024-10-04", "b", "m", Counts(requests=2))], {(DAY, "a"): Use(1, 2, 3, 4)})
        whole = Counts(requests=3, computed_tokens=30, first_token_s=1.5)
        assert two.read(ALL, 10) == [
            Row("2024-10-04", "a", "m", whole),
            Row("2024-10-04", "b", "m", Counts(requests=6)),
        ]
        assert one.budgets(DAY) == {"a": Use(3, 6, 9, 12)}
        assert one.budgets(DAY + 1) == {}


def test_rows_are_chosen_by_day_key_and_model(path: str) -> None:
    rows = [Row(f"2024-10-0{n}", key, model, Counts(1)) for n in (1, 2, 3) for key in "ab" for model in "xy"]
    with opened(path) as file:
        write(file, rows)
        assert file.read(ALL, 100) == rows
        assert file.read(ALL, 5) == rows[:5]
        assert [row.day for row in file.read(Selection("2024-10-02", "2024-10-03", "a", "y"), 100)] == [
            "2024-10-02",
            "2024-10-03",
        ]
        file.forget(DAY, 2)  # from 2024-10-03 on, and two days that are over
        assert file.read(ALL, 100) == rows[4:]


@pytest.mark.parametrize(
    ("by", "places"),
    [
        (("day",), [("2024-10-01", "", ""), ("2024-10-02", "", "")]),
        (("key",), [("", "a", ""), ("", "b", "")]),
        (("day", "model"), [(f"2024-10-0{n}", "", model) for n in (1, 2) for model in "xy"]),
    ],
)
def test_it_adds_up_as_memory_does(path: str, by: tuple[str, ...], places: list[tuple[str, ...]]) -> None:
    rows = [Row(f"2024-10-0{n}", key, model, Counts(n, saved_s=0.5)) for n in (1, 2) for key in "ab" for model in "xy"]
    with opened(path) as file:
        write(file, rows)
        found = file.read(msgspec.structs.replace(ALL, by=by), 100)
        assert found == merged(rows, by)
        assert [(row.day, row.key, row.model) for row in found] == places
        assert sum(row.counts.requests for row in found) == 12


def test_only_its_user_may_read_it(path: str) -> None:
    with opened(path) as file:
        write(file, [ROW])
        assert {one.stat().st_mode & 0o777 for one in Path(path).parent.iterdir()} == {0o600}


def test_one_of_a_newer_version_is_left_alone(path: str) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 7")
    with opened(path) as file, pytest.raises(sqlite3.DatabaseError, match="a newer version of warmroute"):
        write(file, [ROW])


def test_a_file_of_an_older_router_is_used_on(path: str) -> None:
    with opened(path) as file:
        write(file, [ROW])
    with closing(sqlite3.connect(path)) as older:
        older.execute("DROP TABLE batches")
    with opened(path) as file:
        write(file, [ROW])
        assert file.read(ALL, 10)[0].counts.requests == 2


def test_a_clock_that_jumps_ahead_has_no_day_deleted(path: str) -> None:
    days = [day_text(DAY + number) for number in range(5)]
    with opened(path) as file:
        write(file, [Row(day, "a", "m", Counts(1)) for day in days])
        file.forget(DAY + 4, 5)
        file.forget(DAY + 1000, 5)
        assert [row.day for row in file.read(ALL, 10)] == days
        file.forget(DAY + 6, 4)
        assert [row.day for row in file.read(ALL, 10)] == days[1:]
