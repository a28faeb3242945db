from hypothesis import given
from hypothesis import strategies as st

from events.native import Load
from router.placement.load import ReplicaLoad
from router.placement.policy import Candidate

Step = tuple[str, int, int, float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sent", "unstreamed", "begun", "ended", "reported", "scraped", "tick", "forget"]),
        st.integers(0, 9),
        st.integers(-5, 20_000),
        st.floats(0, 0.3),
    ),
    max_size=80,
)


def do(load: ReplicaLoad, step: Step, now_s: float) -> None:
    what, number, tokens, _ = step
    match what:
        case "sent" | "unstreamed":
            load.sent(number, tokens, now_s, streamed=what == "sent", priority_s=tokens / 8000 if number % 3 else None)
        case "begun":
            load.begun(number, now_s)
        case "ended":
            load.ended(number, now_s)
        case "reported":
            amount = max(0, tokens)
            load.reported(Load(number, number, amount, amount // 20, amount // 10, amount / 2), now_s)
        case "scraped":
            load.scraped(number, number, now_s)
        case "tick":
            load.tick(now_s)
        case "forget":
            load.forget()


@given(STEPS)
def test_numbers_are_never_negative_and_nothing_is_left_when_all_has_ended(steps: list[Step]) -> None:
    candidate = Candidate("r0", 0)
    load = ReplicaLoad(candidate, block_size=16)
    now_s = 0.0
    for step in steps:
        now_s += step[3]
        do(load, step, now_s)
        load.check()
        assert candidate.queued_tokens >= 0 and candidate.in_flight >= 0 and candidate.prefill_tokens_per_s >= 0
        assert candidate.empty_tokens is None or candidate.empty_tokens >= 0
    for number in range(10):
        load.ended(number, now_s)
    load.scraped(0, 0, now_s)
    load.reported(Load(), now_s + 1)
    load.check()
    assert (candidate.queued_tokens, candidate.in_flight, load._queued, load._fresh_given) == (0, 0, 0, 0)
    assert not load._fresh and not load._sent
