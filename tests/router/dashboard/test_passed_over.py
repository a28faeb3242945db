"""Why a replica is given nothing, from decisions that the shipped policies make."""

import random

from router.dashboard.idle import MAX_DECISIONS, MAX_LOOKS, in_words, passed_over
from router.placement.cost import Candidate, Question
from router.placement.decision import Decision
from router.placement.policy import Ring, choose


def fleet(count: int) -> list[Candidate]:
    return [Candidate(f"r{slot}", slot, prefill_tokens_per_s=8000.0) for slot in range(count)]


def decided(candidates: list[Candidate], matched: dict[int, float], count: int, policy: str = "cost") -> list[Decision]:
    rng, ring = random.Random(0), Ring(candidate.name for candidate in candidates)
    return [
        choose(policy, Question(2000, matched, turn=turn, session="one"), candidates, rng, ring)
        for turn in range(count)
    ]


def said(decisions: list[Decision], candidate: Candidate) -> str | None:
    return in_words(passed_over(reversed(decisions), [candidate])[candidate], candidate)


def test_a_replica_without_the_prefix_learns_how_much_more_the_others_had() -> None:
    candidates = fleet(2)
    decisions = decided(candidates, {0: 1800}, 3) + decided(candidates, {0: 1900, 1: 100}, 1)
    words = "in 4 of the last 4 choices another replica was sooner: it had 1,800 more tokens of the prompt cached on"
    assert said(decisions, candidates[1]) == f"{words} average"
    assert said(decisions, candidates[0]) is None


def test_only_the_last_choices_count() -> None:
    candidates = fleet(2)
    decisions = decided(candidates, {1: 1800}, 5) + decided(candidates, {0: 1800}, MAX_DECISIONS)
    told = said(decisions, candidates[1])
    assert told is not None and told.startswith("in 200 of the last 200 choices")


def test_a_large_fleet_looks_at_fewer_choices() -> None:
    candidates = fleet(1000)
    decisions = decided(candidates, {0: 1800}, 10)
    found = passed_over(reversed(decisions), candidates)
    assert {one.counts.total() for one in found.values()} == {MAX_LOOKS // len(candidates)}


def test_a_replica_that_is_given_its_share_needs_no_reason() -> None:
    candidates = fleet(2)
    assert said(decided(candidates, {0: 1800}, 10) + decided(candidates, {1: 1800}, 1), candidates[1]) is None
    rare = decided(candidates, {0: 1800}, 39) + decided(candidates, {1: 1800}, 1)
    told = said(rare, candidates[1])
    assert told is not None and told.startswith("in 39 of the last 40 choices")


def test_no_choice_is_no_prompt() -> None:
    [one, other] = fleet(2)
    assert said(decided([one], {}, 3), other) == "no prompt came for it"


def test_each_cause_has_words_of_its_own() -> None:
    candidates = fleet(2)
    one, other = candidates
    one.assigned_tokens, other.assigned_tokens = 0.0, 1.0
    assert "was as good" in (said(decided(candidates, {}, 1), other) or "")
    other.queued_tokens = 9000.0
    assert "had less to do" in (said(decided(candidates, {}, 1), other) or "")
    other.slowness = 5.0
    assert "counts 5.0 times for now" in (said(decided(candidates, {}, 1), other) or "")
    other.limit = other.all_in_flight = 1
    assert "could not take the prompt" in (said(decided(candidates, {}, 1), other) or "")


def test_a_policy_that_looks_for_no_prefix_is_named() -> None:
    candidates = fleet(2)
    decisions = decided(candidates, {}, 3, "session")
    [idle] = [candidate for candidate in candidates if candidate is not decisions[0].chosen]
    assert said(decisions, idle) == "in 3 of the last 3 choices the policy session took another replica"


def test_one_choice_is_not_counted() -> None:
    candidates = fleet(2)
    assert (said(decided(candidates, {0: 1800}, 1), candidates[1]) or "").startswith("in the last choice another")
