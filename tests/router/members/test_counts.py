"""Counters of a replica since an earlier moment, and quantiles of its times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.prometheus import FIRST_TOKEN_S, Histogram
from router.members.counts import ReplicaCounts
from router.members.tally import Seen, Tally


def tally(*seconds: float, failed: int = 0, tokens: int = 0, cached: int = 0, compared: int = 0, hit: int = 0) -> Tally:
    made = Tally(Seen())
    made.compared_tokens, made.reported_blocks = compared, hit // 16
    made.statuses = {200: len(seconds), 500: failed}
    made.prompt_tokens, made.matched_tokens = tokens, cached
    for one in seconds:
        made.first_token_s.observe(one)
    return made


def counts(*tallies: Tally) -> ReplicaCounts:
    made = ReplicaCounts()
    for one in tallies:
        made.count(one, 16)
    return made


def test_all_models_of_a_replica_count_together() -> None:
    made = counts(tally(0.1, 0.2, failed=1, tokens=100, cached=25), tally(0.3, tokens=300, cached=75))
    assert (made.requests, made.errors, made.prompt_tokens) == (4, 1, 400)
    assert made.hit_predicted() == 0.25
    assert sum(made.first_token) == 3


def test_an_answer_that_broke_off_is_an_error_like_one_of_status_500() -> None:
    one = tally(0.1, 0.2, failed=1)
    one.broken = 1
    assert (counts(one).requests, counts(one).errors) == (3, 2)


def test_shares_of_nothing_are_not_known() -> None:
    nothing = ReplicaCounts()
    assert (nothing.hit_predicted(), nothing.hit_reported(), nothing.ttft_s(0.5)) == (None, None, None)
    assert counts(tally(tokens=100)).hit_reported() is None  # nobody said what was cached


def test_what_answers_report_is_a_share_of_the_prompts_that_they_report_of() -> None:
    made = counts(tally(tokens=1600, compared=160, hit=80), tally(tokens=1600))
    assert made.hit_reported() == 0.5
    assert counts(tally(tokens=1600, compared=160)).hit_reported() == 0.0
    now = counts(tally(tokens=3200, compared=320, hit=80))
    assert now.since(made).hit_reported() == 0.0


def test_what_was_there_before_does_not_count() -> None:
    before = counts(tally(0.1, 0.1, tokens=100, cached=100))
    now = counts(tally(0.1, 0.1, 3.0, tokens=200, cached=100))
    since = now.since(before)
    assert (since.requests, since.prompt_tokens, since.hit_predicted()) == (1, 100, 0.0)
    assert 2.5 < (since.ttft_s(0.5) or 0) <= 5.0
    assert now.since(now) == ReplicaCounts()


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_what_a_worker_that_hangs_does_not_say_makes_nothing_negative(share: float) -> None:
    here, hangs = tally(*[3.0] * 5, tokens=500), tally(*[0.01] * 5, tokens=500, failed=1)
    now = counts(here, tally(*[3.0] * 5, tokens=1))
    since = now.since(counts(here, hangs))
    assert (since.requests, since.errors, since.prompt_tokens, since.hit_predicted()) == (0, 0, 0, None)
    more = counts(here, tally(*[3.0] * 50)).since(counts(here, hangs))
    assert more.requests == 44 and 2.5 < (more.ttft_s(share) or 0) <= 5.0


def test_a_stream_that_starts_over_has_sent_nothing_negative() -> None:
    assert ReplicaCounts(batches=1, stored_blocks=2).since(ReplicaCounts(batches=9, stored_blocks=9)).batches == 0


def test_counting_changes_no_tally() -> None:
    one, other = tally(0.1), tally(0.2)
    counts(one, other)
    assert sum(one.first_token_s.counts) == sum(other.first_token_s.counts) == 1


@given(st.lists(st.floats(0.0005, 100), min_size=1, max_size=50), st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_lies_in_the_bucket_that_it_falls_in(seconds: list[float], share: float) -> None:
    made = counts(tally(*seconds))
    found = made.ttft_s(share)
    place = max(0, -(-int(share * len(seconds) * 1000) // 1000) - 1)  # as many are as short or shorter
    exact = sorted(seconds)[place]
    histogram = Histogram(FIRST_TOKEN_S)
    histogram.observe(exact)
    bucket = histogram.counts.index(1)
    assert found is not None
    assert (FIRST_TOKEN_S[bucket - 1] if bucket else 0.0) <= found <= FIRST_TOKEN_S[bucket]


def test_longer_than_the_longest_bound_is_shown_as_that() -> None:
    assert counts(tally(1e6)).ttft_s(0.5) == FIRST_TOKEN_S[-1]


@given(st.lists(st.lists(st.floats(0, 10), max_size=5), max_size=5))
def test_adding_up_is_counting_all(groups: list[list[float]]) -> None:
    tallies = [tally(*group, tokens=len(group)) for group in groups]
    total = ReplicaCounts()
    for one in tallies:
        total.add(counts(one))
    assert total == counts(*tallies)
