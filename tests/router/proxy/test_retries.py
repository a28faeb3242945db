"""The table of what becomes of a request whose replica fails, and the budget for retries."""

from hypothesis import given
from hypothesis import strategies as st

from router.proxy.retries import MOST, PER_S, SHARE, RetryBudget
from tests.docs.retries import PART, table


def test_the_page_shows_the_table() -> None:
    assert PART.text() == table(), "write it by: python -m tests.docs.retries"


def test_a_fifth_of_the_requests_may_be_asked_again() -> None:
    budget = RetryBudget(left=0.0)
    taken = 0
    for _ in range(1000):
        budget.requests += 1
        taken += budget.take(0.0)
    assert abs(taken - 1000 * SHARE) <= 1


def test_some_may_be_asked_again_however_few_there_are() -> None:
    budget = RetryBudget(left=0.0)
    assert not budget.take(0.0)
    assert budget.take(2 / PER_S) and budget.take(2 / PER_S) and not budget.take(2 / PER_S)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=200))
def test_there_are_never_more_than_a_share_and_a_rate_and_what_was_saved(steps: list[tuple[bool, float]]) -> None:
    budget = RetryBudget()
    now_s, requests, taken = 0.0, 0, 0
    for is_request, passed_s in steps:
        now_s += passed_s
        if is_request:
            budget.requests += 1
            requests += 1
        else:
            taken += budget.take(now_s)
        assert 0 <= budget.left <= MOST
        assert taken <= MOST + SHARE * requests + PER_S * now_s + 1e-6
