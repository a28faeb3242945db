"""Rates and rises, from looks at given times."""

from router.console.top.history import NOTHING, WINDOW_S, History
from router.responses import FeedState, ReplicaStatus, Served
from tests.router.console.top.samples import a_replica


def served(
    requests: int, prompt_tokens: int = 0, matched_tokens: int = 0, seq: int = 0, name: str = "r0"
) -> ReplicaStatus:
    return a_replica(name, served=Served(requests, prompt_tokens, matched_tokens), events=FeedState(seq=seq))


def test_rates_are_what_happened_between_the_looks() -> None:
    history = History()
    history.add([served(10, 1000, 500, seq=5)], 100.0)
    assert history.recent("r0") == NOTHING
    history.add([served(30, 9000, 6500, seq=25)], 110.0)
    recent = history.recent("r0")
    assert (recent.requests, recent.prompt_tokens, recent.prefill_tokens) == (2.0, 800.0, 200.0)
    assert (recent.hit, recent.batches) == (0.75, 2.0)
    assert history.recent("r0", "gone") == recent
    assert history.recent("r0", "r0").requests == 4.0


def test_without_prompts_there_is_no_hit_rate() -> None:
    history = History()
    for at_s in (0.0, 1.0):
        history.add([served(1)], at_s)
    assert history.recent("r0").hit is None


def test_what_is_older_than_the_window_counts_no_more() -> None:
    history = History()
    for at_s in range(100):
        history.add([served(1000 if at_s >= 50 else at_s)], float(at_s))
    assert history.recent("r0").requests == 0.0


def test_two_looks_that_are_far_apart_still_say_something() -> None:
    history = History()
    history.add([served(0)], 0.0)
    history.add([served(1000)], 1000.0)
    assert history.recent("r0").requests == 1.0


def test_a_router_that_counts_from_zero_again_has_no_negative_rates() -> None:
    history = History()
    history.add([served(500)], 0.0)
    history.add([served(3)], 1.0)
    assert history.recent("r0").requests == 0.0
    history.add([served(5)], 2.0)
    assert history.recent("r0").requests == 1.0


def test_a_replica_that_was_away_for_a_look_and_counts_from_zero_has_no_negative_rates() -> None:
    history = History()
    history.add([served(500, 9000, 800), served(10, name="r1")], 0.0)
    history.add([served(20, name="r1")], 1.0)
    assert history.recent("r0") == NOTHING
    history.add([served(3, 60, 20), served(30, name="r1")], 2.0)
    assert history.recent("r0").requests == 0.0 and history.recent("r1").requests == 10.0
    history.add([served(5, 100, 40), served(40, name="r1")], 4.0)
    recent = history.recent("r0")
    assert (recent.requests, recent.prefill_tokens, recent.hit) == (0.5, 5.0, 0.5)


def test_a_replica_that_came_later_is_measured_since_then() -> None:
    history = History()
    history.add([served(0)], 0.0)
    history.add([served(0), served(100, name="r1")], 10.0)
    assert history.recent("r1") == NOTHING
    history.add([served(0), served(110, name="r1")], 12.0)
    assert history.recent("r1").requests == 5.0
    assert history.recent("gone") == NOTHING


def test_a_stream_that_begins_anew_is_news_and_its_batches_count_from_there() -> None:
    history = History()
    history.add([a_replica(served=Served(5), events=FeedState(seq=900))], 0.0)
    history.add([a_replica(served=Served(7), events=FeedState(seq=2, restarts=1))], 1.0)
    recent = history.recent("r0")
    assert (recent.requests, recent.batches) == (2.0, 0.0)
    assert recent.risen == {"restarts"}
    history.add([a_replica(served=Served(7), events=FeedState(seq=6, restarts=1))], 2.0)
    assert history.recent("r0").batches == 2.0


def test_a_counter_that_rose_is_news_for_some_seconds() -> None:
    history = History()
    history.add([a_replica(events=FeedState(gaps=3))], 0.0)
    assert not history.recent("r0").risen  # that was before anybody looked
    history.add([a_replica(events=FeedState(gaps=4))], 1.0)
    history.add([a_replica(events=FeedState(gaps=4, restarts=1))], 2.0)
    assert history.recent("r0").risen == {"gaps", "restarts"}
    history.add([a_replica(events=FeedState(gaps=4, restarts=1))], 1.5 + WINDOW_S)
    assert history.recent("r0").risen == {"restarts"}
    history.add([a_replica(events=None)], 2.0 + WINDOW_S)
    assert not history.recent("r0").risen
