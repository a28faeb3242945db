from hypothesis import given
from hypothesis import strategies as st

from router.placement.waiting import STEP_S, Waiting

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
