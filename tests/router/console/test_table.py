"""Rows sorted, filtered and cut to a width, without a terminal."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from router.console.formatting import Column
from router.console.table import Table
from router.console.top.tables import FIGURES, decision_table, replica_table


class Fruit(NamedTuple):
    name: str
    number: int
    note: str = ""


COLUMNS: tuple[Column[Fruit], ...] = (
    Column("fruit", lambda one: one.name, width=5, right=False, fit=True, cut_middle=True),
    Column("number", lambda one: one.number, width=6, drop_order=1, descending=True),
    Column("note", lambda one: one.note, right=False, drop_order=2),
)
PEAR, APPLE, FIG = Fruit("pear", 3, "green"), Fruit("apple", 1, "red"), Fruit("fig", 2, "blue")


def a_table(*items: Fruit) -> Table[Fruit]:
    table = Table(COLUMNS, lambda one: one.name, lambda one: f"{one.name} {one.note}")
    table.show(items or (PEAR, APPLE, FIG))
    return table


def text(table: Table[Fruit], width: int = 40) -> list[str]:
    return ["".join(part for part, _ in line).rstrip() for line in table.lines(width, 100)]


def turn(table: Table[Fruit]) -> None:
    table.reverse = not table.reverse
    table.show()


def test_rows_come_as_they_are_given() -> None:
    assert text(a_table()) == [
        "fruit  number  note",
        "pear        3  green",
        "apple       1  red",
        "fig         2  blue",
    ]


def test_the_next_column_to_sort_by_is_the_one_beside() -> None:
    table = a_table()
    table.sort_by_next(1, 40)
    assert (table.shown, text(table)[0]) == ([APPLE, FIG, PEAR], "fru…▲  number  note")
    table.sort_by_next(1, 40)
    assert (table.shown, text(table)[0]) == ([PEAR, FIG, APPLE], "fruit ▼number  note")
    turn(table)
    assert (table.shown, text(table)[0]) == ([APPLE, FIG, PEAR], "fruit ▲number  note")
    table.sort_by_next(1, 40)
    table.sort_by_next(1, 40)
    assert table.shown == [PEAR, APPLE, FIG] and text(table)[0] == "fruit  number  note"
    table.sort_by_next(-1, 40)
    assert text(table)[0] == "fruit  number ▲note"


def test_a_filter_finds_words_in_any_letters() -> None:
    table = a_table()
    table.filter = "  Gre "
    table.show()
    assert table.shown == [PEAR] and len(table.all) == 3
    table.show([FIG])
    assert table.shown == []
    table.filter = ""
    table.show()
    assert table.shown == [FIG]


def test_the_cursor_stays_on_its_row() -> None:
    table = a_table()
    table.move_to(1)
    assert table.current == APPLE
    table.sort_by_next(2, 40)
    assert (table.cursor, table.current) == (2, APPLE)
    table.show([PEAR, FIG])
    assert table.current == FIG  # it was the last one
    table.move_to(99)
    assert table.cursor == 1
    table.show([])
    assert not table.shown and table.cursor_key is None
    table.show([PEAR])
    assert table.current == PEAR


@pytest.mark.parametrize(("width", "head"), [(40, "fruit  number  note"), (26, "fruit  number"), (12, "fruit")])
def test_what_can_be_done_without_goes_first(width: int, head: str) -> None:
    assert text(a_table(), width)[0] == head


def test_a_long_name_is_cut_in_its_middle() -> None:
    table = a_table(Fruit("a-fruit-with-a-very-long-name-7", 1))
    assert text(table, 60)[1].startswith("a-fru…name-7       1")
    assert text(table, 120)[1].startswith("a-fruit-wit…-long-name-7       1")


def test_a_column_that_says_nothing_is_left_out() -> None:
    noted = COLUMNS[2]._replace(is_shown=lambda items: any(one.note for one in items))
    table = Table((COLUMNS[0], noted), lambda one: one.name, lambda one: one.name)
    table.show([Fruit("kiwi", 1)])
    assert text(table) == ["fruit", "kiwi"]
    table.show([PEAR])
    assert text(table)[0] == "fruit  note"


@given(
    st.lists(st.builds(Fruit, st.text(max_size=40), st.integers(0, 10**9), st.text(max_size=60)), max_size=5),
    st.integers(12, 200),
)
def test_a_line_is_never_wider_than_the_terminal(items: list[Fruit], width: int) -> None:
    table = a_table()
    table.show(items)
    for line in table.lines(width, 100):
        assert sum(cell_len(part) for part, _ in line) <= width


def test_the_cursor_stays_where_it_can_be_seen() -> None:
    table = a_table(*(Fruit(f"f{number}", number) for number in range(9)))
    table.move_to(7)
    assert [line[0][0].strip() for line in table.lines(40, 4, focused=True)] == ["fruit", "f5", "f6", "f7"]
    table.move_to(6)
    assert [line[0][0].strip() for line in table.lines(40, 4, focused=True)] == ["fruit", "f5", "f6", "f7"]
    table.move_to(0)
    assert [line[0][0].strip() for line in table.lines(40, 4, focused=True)] == ["fruit", "f0", "f1", "f2"]
    assert ["on #264f78" in line[0][1] for line in table.lines(40, 3, focused=True)] == [False, True, False]


@pytest.mark.parametrize("table", [replica_table(FIGURES), decision_table()], ids=lambda one: one.columns[0].title)
def test_titles_of_the_tables_fit_into_eighty_columns(table: Table[object]) -> None:
    assert sum(cell_len(part) for part, _ in table.lines(80, 1)[0]) <= 80
