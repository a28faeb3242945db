import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.cost import Candidate
from router.placement.waiting import LEAST_WAIT_S, MAX_WAIT_S, STEP_S, Waiting


def drained(waiting: Waiting[str]) -> list[str]:
    found = []
    while (entry := waiting.take(100.0)) is not None:
        found.append(entry)
    return found


def test_a_full_queue_refuses_the_newcomer_or_the_worst_if_the_newcomer_is_better() -> None:
    waiting: Waiting[str] = Waiting(2)
    waiting.offer("first", 1, 1.0)
    waiting.offer("second", 1, 2.0)
    assert waiting.offer("third", 1, 3.0) == "third"
    assert waiting.offer("urgent", 0, 3.0) == "second"
    assert drained(waiting) == ["urgent", "first"]


def test_of_two_that_came_in_one_moment_the_one_that_comes_again_stays() -> None:
    """The router's clock counts milliseconds."""
    waiting: Waiting[str] = Waiting(1)
    waiting.offer("new", 0, 1.0, since_s=1.0)
    assert waiting.offer("as new", 0, 1.0, since_s=1.0) == "as new"
    assert waiting.offer("begun", 0, 2.0, since_s=1.0) == "new"
    assert drained(waiting) == ["begun"]


def test_of_two_that_come_again_a_begun_answer_stays() -> None:
    waiting: Waiting[str] = Waiting(2)
    waiting.offer("other", 0, 1.0, since_s=1.0)
    waiting.offer("begun", 0, 2.0, since_s=1.0, begun=True)
    assert waiting.offer("again", 0, 2.0, since_s=1.0) == "other"
    assert waiting.offer("begun, too", 0, 3.0, since_s=1.0, begun=True) == "again"
    assert waiting.offer("once more", 0, 3.0, since_s=1.0) == "once more"
    waiting.check()
    assert len(waiting) == 2


def test_no_request_waits_without_any_room() -> None:
    waiting: Waiting[str] = Waiting(0)
    assert waiting.offer("first", 0, 1.0) == "first" and len(waiting) == 0
    with pytest.raises(ValueError, match="capacity is -1"):
        Waiting[str](-1)


def test_who_stands_back_waits_for_half_of_the_room() -> None:
    waiting: Waiting[str] = Waiting(10)
    replica = Candidate("r0", 0, limit=4, all_in_flight=2)
    waiting.offer("flood", 0.0, 0.0, stands_back=True)
    waiting.offer("quiet", 0.0, 1.0)
    assert list(waiting.with_room(2.0, lambda _: [replica])) == ["quiet"]
    replica.all_in_flight = 1
    assert list(waiting.with_room(2.0, lambda _: [replica])) == ["flood"]


def test_no_request_starves() -> None:
    waiting: Waiting[str] = Waiting(1000)
    waiting.offer("patient", 3, 0.0)
    served_s = None
    for second in range(100):  # as many urgent ones come as are served
        waiting.offer(f"urgent {second}", 0, float(second))
        if waiting.take(float(second)) == "patient":
            served_s = second
            break
    assert served_s == 3 * STEP_S


def test_the_estimated_wait_follows_how_fast_others_left() -> None:
    waiting: Waiting[str] = Waiting(100)
    assert waiting.estimated_wait_s(0.0) == LEAST_WAIT_S
    for number in range(20):
        waiting.offer(f"{number}", 0, 0.0)
    for second in range(1, 11):
        waiting.take(second * 2.0)
    assert waiting.estimated_wait_s(20.0) == pytest.approx(11 * 2.0)
    assert waiting.estimated_wait_s(1e6) == MAX_WAIT_S  # nobody leaves any more


def test_the_wait_of_a_rank_counts_those_before_it() -> None:
    waiting: Waiting[str] = Waiting(100)
    assert waiting.wait_of(0.0, 0.0) == 0, "the pace is not known"
    for number in range(20):
        waiting.offer(f"{number}", 0, 0.0, since_s=float(number))
    for second in range(1, 11):
        waiting.take(second * 2.0)
    assert waiting.wait_of(9.0, 20.0) == pytest.approx(2.0)
    assert waiting.wait_of(14.5, 20.0) == pytest.approx(6 * 2.0)
    assert waiting.wait_of(100.0, 20.0) == pytest.approx(11 * 2.0)


def test_a_quiet_hour_does_not_count_as_slowness() -> None:
    waiting: Waiting[str] = Waiting(100)
    waiting.offer("old", 0, 0.0)
    waiting.take(0.1)
    waiting.offer("new", 0, 3600.0)
    assert waiting.estimated_wait_s(3600.2) == LEAST_WAIT_S


# ---- room


@pytest.mark.parametrize("limit", [1, 2])
def test_waiting_requests_cost_a_few_look_ups_in_any_number(limit: int) -> None:
    """Nobody has room for any of them: the replica is full, or (with a limit of 2) all are too long for it."""
    waiting: Waiting[str] = Waiting(1000)
    for number in range(1000):
        waiting.offer(f"r{number}", 0, float(number), group="m", tokens=5000 + number % 7)
    looks: list[str] = []

    def candidates_of(group: str) -> list[Candidate]:
        looks.append(group)
        return [Candidate("only", 0, all_in_flight=1, limit=limit, max_model_len=4096)]

    assert list(waiting.with_room(2000.0, candidates_of)) == []
    assert len(looks) <= 3
    assert len(waiting) == 1000


def test_room_goes_to_those_it_is_enough_for_in_their_order() -> None:
    waiting: Waiting[str] = Waiting(10)
    for number, tokens in enumerate((5000, 10, 9000, 20, 30)):
        waiting.offer(f"r{number}", 0, float(number), group="m", tokens=tokens)
    replica = Candidate("only", 0, limit=2, max_model_len=4096)
    taken = []
    for entry in waiting.with_room(10.0, lambda _: [replica]):
        taken.append(entry)
        replica.all_in_flight += 1
    assert taken == ["r1", "r3"]
    assert drained(waiting) == ["r0", "r2", "r4"]


# ---- against a list that is sorted every time


Step = tuple[str, int, int, float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "offer", "take", "cancel", "expire"]),
        st.integers(0, 15),
        st.integers(-3, 3),
        st.floats(0, 8),
    ),
    max_size=80,
)


class Model:
    """A list, sorted every time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[tuple[float, int, int, float]] = []  # rank, number, entry, deadline
        self.number = 0

    def offer(self, entry: int, priority: int, now_s: float, deadline_s: float) -> int | None:
        self.number += 1
        self.entries = sorted([*self.entries, (now_s + STEP_S * priority, self.number, entry, deadline_s)])
        return self.entries.pop()[2] if len(self.entries) > self.capacity else None

    def take(self) -> int | None:
        return self.entries.pop(0)[2] if self.entries else None

    def cancel(self, entry: int) -> bool:
        before = len(self.entries)
        self.entries = [one for one in self.entries if one[2] != entry]
        return len(self.entries) < before

    def expire(self, now_s: float) -> list[int]:
        gone = sorted((one[3], one[1], one[2]) for one in self.entries if one[3] <= now_s)
        self.entries = [one for one in self.entries if one[3] > now_s]
        return [entry for _, _, entry in gone]


@given(st.integers(0, 6), STEPS)
def test_it_does_what_a_sorted_list_does(capacity: int, steps: list[Step]) -> None:
    waiting: Waiting[int] = Waiting(capacity)
    model = Model(capacity)
    now_s = 0.0
    for what, entry, priority, passed_s in steps:
        now_s += passed_s
        if what == "offer" and entry not in waiting:
            deadline_s = now_s + 2 * entry
            assert waiting.offer(entry, priority, now_s, deadline_s) == model.offer(entry, priority, now_s, deadline_s)
        elif what == "take":
            assert waiting.take(now_s) == model.take()
        elif what == "cancel":
            assert waiting.cancel(entry) == model.cancel(entry)
        elif what == "expire":
            assert waiting.expire(now_s) == model.expire(now_s)
        waiting.check()
        assert len(waiting) == len(model.entries)
        assert waiting.estimated_wait_s(now_s) > 0
