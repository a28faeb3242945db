import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.measured_rate import ENOUGH
from events.native import Load
from router.placement.cost import Candidate
from router.placement.load import STALE_S, ReplicaLoad, Speed


def replica(**known: int) -> tuple[Candidate, ReplicaLoad]:
    candidate = Candidate("r0", 0)
    return candidate, ReplicaLoad(candidate, **known)


def taught(load: ReplicaLoad) -> None:
    """It has computed 8,000 tokens per second, before time 0."""
    for number in range(-ENOUGH - 1, 0):
        load.sent(number, 4000, float(number))
        load.begun(number, number + 0.5)
        load.ended(number, number + 0.5)


# ---- the queue, with reports


def test_what_was_sent_after_a_report_is_added_until_the_next_one() -> None:
    candidate, load = replica()
    load.reported(Load(queued_prefill_tokens=1000), 10.0)
    load.sent(1, 500, 10.1)
    assert candidate.queued_tokens == 1500
    load.reported(Load(queued_prefill_tokens=1400), 10.25)
    assert candidate.queued_tokens == 1400  # the report holds it


def test_what_was_sent_just_before_a_report_may_not_be_in_it() -> None:
    candidate, load = replica()
    load.sent(1, 500, 10.22)
    load.sent(2, 300, 10.24)
    load.reported(Load(queued_prefill_tokens=500), 10.26)
    assert candidate.queued_tokens == 800
    load.reported(Load(queued_prefill_tokens=700), 10.5)
    assert candidate.queued_tokens == 700


def test_a_first_byte_takes_the_request_from_the_queue() -> None:
    candidate, load = replica()
    load.reported(Load(), 10.0)
    load.sent(1, 500, 10.1)
    load.begun(1, 10.2)
    load.begun(1, 10.21)  # told twice
    assert candidate.queued_tokens == 0 and candidate.in_flight == 1


def test_a_reported_request_that_begins_takes_no_more_than_could_be_computed_since() -> None:
    candidate, load = replica()
    load.sent(1, 30_000, 0.0)
    load.reported(Load(queued_prefill_tokens=10_500, prefill_tokens_per_s=8000.0), 4.0)  # 500 of them are the request's
    load.begun(1, 4.0625)
    assert candidate.queued_tokens == 10_000


def test_a_request_that_fails_before_its_first_byte_leaves_the_queue() -> None:
    candidate, load = replica(block_size=16, total_blocks=1000)
    load.reported(Load(free_blocks=1000), 10.0)
    load.sent(1, 500, 10.1)
    load.ended(1, 10.2)
    assert (candidate.queued_tokens, candidate.in_flight, candidate.empty_tokens) == (0, 0, 16_000)


# ---- the queue, without reports


def test_without_reports_the_queue_is_what_we_sent() -> None:
    candidate, load = replica()
    load.sent(1, 500, 0.0)
    load.sent(2, 300, 0.0)
    assert candidate.queued_tokens == 800
    load.begun(1, 0.1)
    assert candidate.queued_tokens == 300
    load.ended(1, 0.2)
    load.ended(2, 0.2)
    assert (candidate.queued_tokens, candidate.in_flight) == (0, 0)


def test_the_waiting_requests_of_others_count_with_the_mean_prompt() -> None:
    candidate, load = replica()
    load.sent(1, 400, 0.0)
    load.scraped(running=3, waiting=6, now_s=0.5)
    assert candidate.queued_tokens == 400 + 5 * 400  # one of the six is ours
    assert (candidate.running, candidate.waiting) == (3, 6)


def test_what_an_engine_tells_by_its_own_stream_counts_more_than_its_metrics() -> None:
    candidate, load = replica()
    load.scraped(3, 6, 0.5, told=True)
    load.scraped(9, 0, 1.0)
    assert (candidate.running, candidate.waiting) == (3, 6)
    load.scraped(9, 0, 0.5 + STALE_S)  # the stream has ended
    assert (candidate.running, candidate.waiting) == (9, 0)


def test_a_request_that_does_not_stream_leaves_the_queue_when_it_should_be_prefilled() -> None:
    candidate, load = replica()
    taught(load)
    load.sent(2, 4000, 1.0, streamed=False)
    load.tick(1.49)
    assert candidate.queued_tokens == 4000
    load.tick(1.51)
    assert candidate.queued_tokens == 0
    load.begun(2, 9.0)  # its whole answer: no word about prefill
    load.ended(2, 9.0)
    assert candidate.prefill_tokens_per_s == 8000


def test_a_restarted_replica_owes_nothing() -> None:
    candidate, load = replica(block_size=16, total_blocks=100)
    load.reported(Load(running=3, waiting=1, queued_prefill_tokens=9000, prefill_tokens_per_s=5.0), 0.0)
    load.sent(1, 500, 0.1)
    load.forget()
    load.begun(1, 0.2)
    load.ended(1, 0.3)  # what was on its way to the old one
    assert (candidate.queued_tokens, candidate.in_flight, candidate.running, candidate.waiting) == (0, 0, 0, 0)
    assert (candidate.prefill_tokens_per_s, candidate.empty_tokens) == (0, None)
    load.check()


def test_a_replica_that_is_not_heard_any_more_runs_no_more_than_it_was_sent() -> None:
    candidate, load = replica()
    load.sent(1, 500, 9.0)
    load.reported(Load(running=3, waiting=2), 10.0)
    load.tick(19.0)
    assert (candidate.running, candidate.waiting) == (3, 2)
    load.tick(20.1)
    assert (candidate.running, candidate.waiting) == (1, 0)
    load.ended(1, 20.2)
    load.tick(20.3)
    assert candidate.running == 0


def test_memory_is_bounded_though_no_report_ever_comes() -> None:
    candidate, load = replica()
    for number in range(5000):
        load.sent(number, 100, float(number))
        load.begun(number, number + 0.5)
        load.ended(number, number + 0.6)
    assert len(load._fresh) <= 1024 and not load._sent
    assert candidate.queued_tokens == 0
    load.check()


# ---- the empty cache


def test_empty_cache_is_what_is_neither_cached_nor_promised() -> None:
    candidate, load = replica(block_size=16, total_blocks=1000)
    load.reported(Load(free_blocks=1000, cached_blocks=200), 0.0)
    assert candidate.empty_tokens == 800 * 16
    load.sent(1, 1600, 0.1)
    assert candidate.empty_tokens == 700 * 16
    load.begun(1, 0.2)
    assert candidate.empty_tokens == 700 * 16  # prefilled, but not yet reported
    load.reported(Load(free_blocks=900, cached_blocks=300), 0.3)
    assert candidate.empty_tokens == 700 * 16
    load.reported(Load(free_blocks=900, cached_blocks=300, queued_prefill_tokens=1600), 0.6)
    assert candidate.empty_tokens == 600 * 16  # what waits will take its room


def test_the_most_blocks_ever_seen_stand_for_an_unknown_total() -> None:
    candidate, load = replica(block_size=16)
    load.reported(Load(free_blocks=1000), 0.0)
    load.reported(Load(free_blocks=900, cached_blocks=300), 0.3)
    assert candidate.empty_tokens == 700 * 16


# ---- the rate


def test_the_replicas_own_rate_goes_before_what_we_learned() -> None:
    candidate, load = replica()
    taught(load)
    load.reported(Load(), 1.1)
    assert candidate.prefill_tokens_per_s == 8000
    load.reported(Load(prefill_tokens_per_s=9000.0), 1.3)
    assert candidate.prefill_tokens_per_s == 9000


def test_a_prompt_that_waited_for_another_is_timed_from_its_first_byte() -> None:
    speed = Speed()
    for began_s in (0.0, 2.0):
        speed.first_byte(4000, began_s, began_s + 0.5)
        speed.first_byte(8000, began_s + 0.1, began_s + 1.5)
    speed.first_byte(800, 9.0, 9.1)  # the one before is complete now
    assert speed.tokens_per_s == 8000


def test_prompts_of_one_step_are_one_sample() -> None:
    speed = Speed()
    for step in range(ENOUGH + 1):
        for _ in range(4):
            speed.first_byte(1000, step, step + 0.5)
    assert speed.tokens_per_s == 8000


def test_tiny_prompts_teach_nothing() -> None:
    speed = Speed()
    for number in range(10):
        speed.first_byte(20, float(number), number + 0.3)
    assert speed.tokens_per_s == 0


@pytest.mark.parametrize("seconds", [60.0, 0.006])
def test_one_outlier_does_not_move_the_rate(seconds: float) -> None:
    speed = Speed()
    for number in range(30):
        speed.first_byte(4000, 100.0 * number, 100.0 * number + 0.5)
    speed.first_byte(4000, 5000.0, 5000.0 + seconds)
    speed.first_byte(4000, 6000.0, 6000.5)
    assert speed.tokens_per_s == 8000


def test_a_replica_that_got_slower_is_believed_after_a_while() -> None:
    speed = Speed()
    for number in range(60):
        speed.first_byte(4000, 100.0 * number, 100.0 * number + (0.5 if number < 30 else 4.0))
    assert speed.tokens_per_s == pytest.approx(1000, rel=0.3)


# ---- any steps


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
