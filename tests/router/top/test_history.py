"""Rates and rises, from looks at given times."""

from router.top.answers import Events, Replica, Served, Totals
from router.top.history import NEWS_S, WINDOW_S, History
from tests.router.top.samples import a_replica


def served(requests: int, prompt_tokens: int = 0, matched_tokens: int = 0, seq: int = 0, name: str = "r0") -> Replica:
    return a_replica(name, served=Served(requests, prompt_tokens, matched_tokens), events=Events(seq=seq))


def test_rates_are_what_happened_between_the_looks() -> None:
    history = History()
    history.add([served(10, 1000, 500, seq=5)], 100.0)
    assert history.rates("r0") is None and history.total() is None
    history.add([served(30, 9000, 6500, seq=25)], 110.0)
    rates = history.rates("r0")
    assert rates is not None
    assert (rates.requests_per_s, rates.prompt_tokens_per_s, rates.prefill_tokens_per_s) == (2.0, 800.0, 200.0)
    assert (rates.hit, rates.batches_per_s) == (0.75, 2.0)
    assert history.total() == rates


def test_without_prompts_there_is_no_hit_rate() -> None:
    history = History()
    for at_s in (0.0, 1.0):
        history.add([served(1)], at_s)
    rates = history.rates("r0")
    assert rates is not None and rates.hit is None


def test_what_is_older_than_the_window_counts_no_more() -> None:
    history = History()
    for at_s in range(100):
        history.add([served(1000 if at_s >= 50 else at_s)], float(at_s))
    rates = history.rates("r0")
    assert rates is not None and rates.requests_per_s == 0.0
    assert len(history._samples) <= WINDOW_S + 2


def test_two_looks_that_are_far_apart_still_say_something() -> None:
    history = History()
    history.add([served(0)], 0.0)
    history.add([served(1000)], 1000.0)
    rates = history.rates("r0")
    assert rates is not None and rates.requests_per_s == 1.0


def test_a_router_that_counts_from_zero_again_has_no_negative_rates() -> None:
    history = History()
    history.add([served(500)], 0.0)
    history.add([served(3)], 1.0)
    assert history.rates("r0") is None
    history.add([served(5)], 2.0)
    rates = history.rates("r0")
    assert rates is not None and rates.requests_per_s == 2.0


def test_a_replica_that_came_later_is_measured_since_then() -> None:
    history = History()
    history.add([served(0)], 0.0)
    history.add([served(0), served(100, name="r1")], 10.0)
    assert history.rates("r1") is None
    history.add([served(0), served(110, name="r1")], 12.0)
    rates = history.rates("r1")
    assert rates is not None and rates.requests_per_s == 5.0
    assert history.rates("gone") is None


def test_batches_of_a_replica_that_began_anew_are_not_negative() -> None:
    history = History()
    history.add([served(0, seq=900)], 0.0)
    history.add([served(0, seq=2)], 1.0)
    rates = history.rates("r0")
    assert rates is not None and rates.batches_per_s == 0.0


def test_a_counter_that_rose_is_news_for_a_minute() -> None:
    history = History()
    history.add([a_replica(events=Events(gaps=3))], 0.0)
    assert not history.risen("r0")  # that was before anybody looked
    history.add([a_replica(events=Events(gaps=4))], 1.0)
    history.add([a_replica(events=Events(gaps=4, restarts=1))], 2.0)
    assert history.risen("r0") == {"gaps", "restarts"} == history.any_risen()
    history.add([a_replica(events=Events(gaps=4, restarts=1))], 1.5 + NEWS_S)
    assert history.risen("r0") == {"restarts"}
    history.add([a_replica(events=None)], 2.0 + NEWS_S)
    assert not history.any_risen()


def test_the_mean_time_to_first_token_is_of_the_last_seconds() -> None:
    def totals(count: float, seconds: float) -> Totals:
        return Totals(time_to_first_token_seconds_count=count, time_to_first_token_seconds_sum=seconds)

    history = History()
    assert history.mean_ttft_s() is None
    history.add_totals(totals(100, 900.0), 0.0)
    history.add_totals(totals(100, 900.0), 1.0)
    assert history.mean_ttft_s() is None
    history.add_totals(totals(110, 901.0), 2.0)
    assert history.mean_ttft_s() == 0.1
    history.add_totals(totals(2, 4.0), 3.0)
    assert history.mean_ttft_s() is None  # another router process
