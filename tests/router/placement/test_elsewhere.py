"""The choice where a prompt is computed: where it is generated, or at another replica that hands its KV over."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.measured_rate import ENOUGH
from router.placement.cost import Candidate, Question, Role, Unread, can_split, in_words, obstacles
from router.placement.decision import Decision
from router.placement.elsewhere import (
    FORGET_S,
    LEAST_GAIN_S,
    LEAST_TOKENS,
    Mode,
    Split,
    Transfers,
    fetch,
    fetches,
    split,
    why_not_at_all,
)
from router.placement.placement import Placement
from router.placement.policy import choose
from router.placement.prices import PULL, TOKENS_PER_S

RATE = 8000.0  # tokens per second


def candidate(slot: int, role: Role | None, **known: Any) -> Candidate:
    return Candidate(f"r{slot}", slot, **({"prefill_tokens_per_s": RATE, "role": role} | known))


def decided(question: Question, *candidates: Candidate) -> Decision:
    return choose("cost", question, candidates, random.Random(1))


def weighed(
    tokens: int,
    *,
    running: int = 0,
    here: float = 0,
    there: float = 0,
    queued_there: float = 0,
    mode: Mode = "auto",
    transfers: Transfers | None = None,
    computes: Role = "prefill",
) -> Split:
    """The choice for a prompt of so many tokens, of which `here` and `there` are cached."""
    candidates = (
        candidate(0, "decode", running=running),
        candidate(1, computes, queued_tokens=queued_there, running=running),
    )
    matched = {0: here, 1: there}
    decode = decided(Question(tokens, matched), candidates[0])
    prefill = decided(Question(tokens, matched, half="prefill", tried=frozenset({"r0"})), *candidates)
    return split(mode, decode, prefill, Transfers() if transfers is None else transfers)


def test_a_long_prompt_leaves_a_replica_where_many_answers_would_wait() -> None:
    found = weighed(8000, running=16)
    assert found.elsewhere
    assert (found.replica, found.here_s, found.here_harm_s) == ("r1", 1.0, 16.0)
    assert found.there_harm_s == 0, "nothing is generated there"
    assert "saves" in found.why


def test_it_stays_where_nothing_waits_for_it() -> None:
    found = weighed(8000)
    assert not found.elsewhere
    assert found.there_s > found.here_s, "it would be moved, too"
    assert "would cost" in found.why


def test_it_stays_where_it_is_cached() -> None:
    assert not weighed(8000, running=16, here=7900).elsewhere


def test_it_goes_where_it_is_cached() -> None:
    assert weighed(8000, running=1, there=7900).elsewhere


def test_it_stays_if_the_queue_there_is_long() -> None:
    assert weighed(8000, running=4).elsewhere
    assert not weighed(8000, running=4, queued_there=RATE * 5).elsewhere


def transferred(*seconds: float) -> Transfers:
    """Transfers of 8,000 tokens each."""
    made = Transfers()
    for each in seconds:
        made.fetched(8000, each, 0.0)
    return made


def test_slow_transfers_keep_it() -> None:
    slow, fast = transferred(*[10.0] * ENOUGH), transferred(*[0.01] * ENOUGH)
    assert not weighed(8000, running=4, transfers=slow).elsewhere
    assert weighed(8000, running=4, transfers=fast).elsewhere


def test_a_first_transfer_that_took_long_is_no_reason_to_stay_for_ever() -> None:
    """Engines make their connection with it."""
    assert weighed(8000, running=4, transfers=transferred(10.0)).elsewhere
    assert weighed(8000, running=4, transfers=transferred(10.0, *[0.01] * ENOUGH)).elsewhere


def test_a_replica_that_generates_too_is_harmed_by_what_it_computes_for_others() -> None:
    assert weighed(8000, running=16).elsewhere
    assert not weighed(8000, running=16, computes="both").elsewhere


@pytest.mark.parametrize(("mode", "goes"), [("always", True), ("auto", False)])
def test_always_needs_no_gain(mode: Mode, goes: bool) -> None:
    assert weighed(8000, mode=mode).elsewhere is goes


def test_without_a_prefill_replica_nothing_goes() -> None:
    decode = decided(Question(8000, {}, {}), candidate(0, "decode", running=16))
    prefill = decided(Question(8000, {}, {}, half="prefill"), candidate(0, "decode"), candidate(1, None))
    assert prefill.rejection == "unavailable" and not prefill.question.anyway
    found = split("always", decode, prefill, Transfers())
    assert (found.elsewhere, found.replica) == (False, None)


@pytest.mark.parametrize(
    ("mode", "role", "tokens", "why"),
    [
        ("never", "decode", 8000, "switched off"),
        ("auto", None, 8000, "no role"),
        ("always", None, 8000, "no role"),
        ("auto", "decode", LEAST_TOKENS - 1, "only 255 tokens"),
        ("always", "decode", LEAST_TOKENS - 1, None),
        ("auto", "decode", LEAST_TOKENS, None),
    ],
)
def test_what_is_not_weighed_at_all(mode: Mode, role: Role | None, tokens: int, why: str | None) -> None:
    found = why_not_at_all(mode, decided(Question(tokens, {}, {}), candidate(0, role)))
    assert (found is None) if why is None else (found is not None and why in found)


amounts = st.integers(1, 200_000)


@given(amounts, st.integers(0, 64), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e6))
def test_a_gain_beyond_the_threshold_is_what_decides(
    tokens: int, running: int, here: float, there: float, queued: float
) -> None:
    found = weighed(tokens, running=running, here=here * tokens, there=there * tokens, queued_there=queued)
    assert found.elsewhere == (found.gain_s > found.threshold_s)
    assert found.threshold_s >= LEAST_GAIN_S
    assert min(found.here_s, found.here_harm_s, found.there_s, found.there_harm_s, found.transfer_s) >= 0


@given(amounts, st.integers(0, 64), st.integers(0, 64))
def test_the_more_answers_would_wait_the_more_is_gained(tokens: int, some: int, more: int) -> None:
    fewer, many = (weighed(tokens, running=running).gain_s for running in sorted((some, more)))
    assert many >= fewer


@given(amounts, st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_longer_the_queue_there_the_less_is_gained(tokens: int, some: float, more: float) -> None:
    longer, shorter = (weighed(tokens, queued_there=queued).gain_s for queued in sorted((some, more), reverse=True))
    assert longer <= shorter


# ---- roles


@pytest.mark.parametrize(
    ("role", "prefill", "decode"),
    [("prefill", None, "role"), ("decode", "role", None), ("both", None, None), (None, "role", None)],
)
def test_a_half_is_for_the_replicas_of_its_role(role: Role | None, prefill: str | None, decode: str | None) -> None:
    one = candidate(0, role)
    assert obstacles([one], half="prefill") == [prefill]
    assert obstacles([one]) == [decode]


def test_the_obstacle_names_the_role() -> None:
    assert in_words("role", candidate(0, "prefill"), 1) == "its role is prefill"
    assert in_words("role", candidate(0, None), 1) == "its role is not given"


@pytest.mark.parametrize(
    ("roles", "can"),
    [
        ([], False),
        (["prefill"], False),
        (["both"], False),
        (["prefill", "prefill"], False),
        (["decode", "decode"], False),
        (["prefill", None], False),
        (["prefill", "decode"], True),
        (["prefill", "both"], True),
        (["decode", "both"], True),
        (["both", "both"], True),
    ],
)
def test_which_roles_can_split_a_request(roles: list[Role | None], can: bool) -> None:
    assert can_split(roles) is can


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_a_prompt_that_is_too_long_for_all_of_its_role_is_too_long(half: Any) -> None:
    candidates = [candidate(0, "prefill", max_model_len=10), candidate(1, "decode", max_model_len=10)]
    assert decided(Question(11, {}, {}, half=half), *candidates).rejection == "too_long"


# ---- the second half


def test_kv_that_is_fetched_costs_less_than_computing_and_counts_as_one_token() -> None:
    placement = Placement("cost", optimistic_ttl_s=1.0, first_token_timeout_s=1.0)
    loads = [placement.add(f"r{number}") for number in range(2)]
    loads[0].candidate.role = "decode"
    question, _ = placement.question(Unread(8000), {}, 0.0)
    plain = placement.decide(question, [one.candidate for one in loads])
    fetch(question, [one.candidate for one in loads], None)
    decision = placement.decide(question, [one.candidate for one in loads])
    assert decision.chosen is loads[0].candidate, "the other one has no role, and would compute it"
    assert decision.ttft_s < plain.ttft_s / 4
    assert fetches(question, loads[0].candidate) and not fetches(question, loads[1].candidate)
    placed = placement.sent(decision, loads[0], Unread(8000), 0, 1.0)
    assert (placed.uncached_tokens, placed.fetched_tokens) == (1, 8000)
    assert loads[0].candidate.queued_tokens == 1
    placement.begun(placed, 1.1)
    for _ in range(ENOUGH):
        placement.fetched(placed, 1.5)
    assert placement.transfers.tokens_per_s(1.5) == pytest.approx(16_000)
    placement.ended(placed, 2.0)
    loads[0].check()


def test_short_transfers_tell_nothing_of_the_speed() -> None:
    transfers = Transfers()
    transfers.fetched(LEAST_TOKENS - 1, 1.0, 0.0)
    transfers.fetched(8000, 0.0, 0.0)
    assert transfers.tokens_per_s(0.0) == TOKENS_PER_S[PULL]
    for _ in range(ENOUGH):
        transfers.fetched(8000, 2.0, 0.0)
    assert transfers.tokens_per_s(0.0) == pytest.approx(4000)


def test_transfers_that_seemed_too_slow_are_tried_again() -> None:
    transfers = transferred(*[10.0] * ENOUGH)
    assert transfers.tokens_per_s(FORGET_S) == pytest.approx(800)
    assert transfers.tokens_per_s(FORGET_S + 1) == TOKENS_PER_S[PULL]
    for _ in range(ENOUGH):
        transfers.fetched(8000, 0.1, FORGET_S + 2)
    assert transfers.tokens_per_s(FORGET_S + 2) == pytest.approx(80_000)
