"""How lines are shared out among tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.top.room import LEAST, shared_out


@pytest.mark.parametrize(
    ("lines", "wishes", "given_lines"),
    [
        (20, [5, 6, 200], [5, 6, 9]),
        (20, [5, 200, 200], [5, 6, 9]),
        (20, [200, 200, 200], [8, 5, 7]),
        (20, [5, 4, 6], [5, 4, 11]),
        (5, [9, 9, 9], [5, 0, 0]),
        (8, [9, 9, 9], [5, 3, 0]),
        (1, [9, 9, 9], [1, 0, 0]),
    ],
)
def test_who_needs_little_leaves_the_rest_to_others(lines: int, wishes: list[int], given_lines: list[int]) -> None:
    assert shared_out(lines, wishes, [5, 3, 4]) == given_lines


@given(st.integers(0, 100), st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=4))
def test_all_lines_are_given_and_no_table_is_too_small(lines: int, tables: list[tuple[int, int]]) -> None:
    found = shared_out(lines, [wish for wish, _ in tables], [weight for _, weight in tables])
    assert sum(found) == lines
    assert all(given == 0 or given >= LEAST for given in found) or lines < LEAST
    assert min(found) >= 0
