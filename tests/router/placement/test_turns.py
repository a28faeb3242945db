"""Routers take turns if they get requests at the same moment, and only if a collision would cost more."""

import pytest

from router.placement.outbox import MARGIN_S, MAX_KEPT, MAX_PAUSE_S, Turns

RATE = 8000.0
STEP_S = 0.01


def learned(before: int = 3, peers: int = 7, *, apart_s: float = 0.0, delay_s: float = STEP_S - MARGIN_S) -> Turns:
    """Turns after a minute of requests once a second, of which each peer gets one `apart_s` later."""
    turns = Turns()
    turns.peers, turns.before = peers, before
    for second in range(60):
        for _ in range(5):
            turns.delayed(delay_s)
        turns.sent(second, 8000, second + 0.02)
        for peer in range(peers):
            turns.heard(peer, 0.02, 8000, second + apart_s + 0.02 + delay_s + MARGIN_S)
    return turns


def test_routers_with_requests_at_the_same_moment_choose_one_after_the_other() -> None:
    assert [learned(before).pause_s(8, RATE) for before in range(4)] == pytest.approx(
        [0.0, STEP_S, 2 * STEP_S, 3 * STEP_S], abs=0.001
    )


@pytest.mark.parametrize("apart_s", [-0.4, -0.1, 0.1, 0.4])
def test_requests_at_other_moments_do_not_count(apart_s: float) -> None:
    turns = learned(apart_s=apart_s)
    assert turns.share < 0.01
    assert turns.pause_s(8, RATE) == 0.0


def test_a_collision_that_costs_less_than_a_step_is_risked() -> None:
    turns = learned()
    assert turns.pause_s(8, RATE) > 0
    assert turns.pause_s(8, 100 * RATE) == 0.0, "prompts take no time"
    assert turns.pause_s(800, RATE) == 0.0, "there are many replicas to choose from"


def test_no_turn_takes_long() -> None:
    pauses = [learned(before, delay_s=0.04).pause_s(8, RATE) for before in range(8)]
    assert pauses == sorted(pauses)
    assert 0.08 < max(pauses) <= MAX_PAUSE_S
    assert len({round(each, 3) for each in pauses}) == 4, "some share a turn"


def test_clocks_that_differ_do_no_harm() -> None:
    turns = learned(delay_s=1e9)
    assert turns.pause_s(8, RATE) == 0.0
    turns.delayed(-1e9)
    assert turns.pause_s(8, RATE) <= MAX_PAUSE_S


def test_what_is_kept_is_bounded() -> None:
    turns = Turns()
    for number in range(10 * MAX_KEPT):
        turns.sent(0.0, 10, number * 1e-6)
    assert len(turns._came) <= MAX_KEPT
