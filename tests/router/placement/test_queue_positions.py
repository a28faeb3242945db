from hypothesis import given
from hypothesis import strategies as st

from router.placement.queue_positions import Later, QueuePositions


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
