from hypothesis import given
from hypothesis import strategies as st

from router.placement.queue_positions import Later, QueuePositions


def turns_of(*waiting: tuple[float, float]) -> QueuePositions:
    """One is being computed, and these wait: (rank, tokens)."""
    turns = QueuePositions()
    turns.add(-1, 0.0, 100.0)
    for number, (rank_s, tokens) in enumerate(waiting):
        turns.add(number, rank_s, tokens)
    return turns


def test_the_running_prompt_is_not_overtaken() -> None:
    assert turns_of().later_than(-10.0) == Later(0, 0)


def test_a_prompt_goes_before_those_of_a_later_rank() -> None:
    turns = turns_of((3.0, 300.0), (1.0, 100.0), (2.0, 200.0))
    assert turns.later_than(0.5) == Later(3, 600.0)
    assert turns.later_than(1.5) == Later(2, 500.0)
    assert turns.later_than(2.0) == Later(1, 300.0)  # who came first goes first
    assert turns.later_than(3.0) == Later(0, 0)


def test_when_one_is_done_it_is_the_turn_of_the_lowest_rank() -> None:
    turns = turns_of((3.0, 300.0), (1.0, 100.0))
    turns.discard(-1)
    assert turns.later_than(0.0) == Later(1, 300.0)


def test_one_that_leaves_the_queue_is_not_counted_any_more() -> None:
    turns = turns_of((3.0, 300.0), (1.0, 100.0))
    turns.discard(0)
    turns.discard(0)
    turns.discard(99)
    assert turns.later_than(0.0) == Later(1, 100.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 5), st.integers(1, 9)), max_size=60))
def test_it_says_what_a_plain_list_says(steps: list[tuple[bool, int, int, int]]) -> None:
    turns = QueuePositions()
    now: int | None = None
    waiting: dict[int, tuple[int, int]] = {}
    for comes, number, rank, tokens in steps:
        if comes and number != now and number not in waiting:
            turns.add(number, float(rank), float(tokens))
            if now is None:
                now = number
            else:
                waiting[number] = rank, tokens
        elif not comes:
            turns.discard(number)
            waiting.pop(number, None)
            if number == now:
                now = min(waiting, key=lambda one: (waiting[one][0], one), default=None)
                waiting.pop(-1 if now is None else now, None)
        turns.check()
        assert len(turns) == len(waiting)
        for limit in range(7):
            later = [tokens for rank, tokens in waiting.values() if rank > limit]
            assert turns.later_than(float(limit)) == Later(len(later), float(sum(later)))
    turns.clear()
    turns.check()
    assert not turns
