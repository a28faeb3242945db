"""Restarts of a lost fleet: their number and pauses, and the replicas of each."""

import math

from fleet.commands.view import ModelView, View
from fleet.plan import FleetPlan, ModelPlan
from fleet.up.running import LONGEST_PAUSE_S, SETTLED_S, Retries, plan_now


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_try_is_at_once_and_each_later_one_waits_twice_as_long_until_there_were_enough() -> None:
    retries = Retries(5, Clock())
    retries.lost()
    assert [retries.next_pause_s() for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 4.0, None, None]


def test_a_try_that_takes_long_counts_like_any_other() -> None:
    clock = Clock()
    retries = Retries(2, clock)
    retries.lost()
    for _ in range(2):
        assert retries.next_pause_s() is not None
        clock.now_s += 2 * SETTLED_S
    assert retries.next_pause_s() is None


def test_a_fleet_that_dies_soon_after_each_try_uses_them_up() -> None:
    clock = Clock()
    retries = Retries(3, clock)
    for _ in range(3):
        retries.lost()
        assert retries.next_pause_s() is not None
        retries.began()
        clock.now_s += SETTLED_S / 2
    retries.lost()
    assert retries.next_pause_s() is None


def test_a_fleet_that_lasted_gets_all_tries_again() -> None:
    clock = Clock()
    retries = Retries(1, clock)
    for _ in range(3):
        retries.lost()
        assert retries.next_pause_s() == 0.0
        retries.began()
        clock.now_s += SETTLED_S + 1


def test_without_a_limit_the_pause_stays_bounded() -> None:
    retries = Retries(math.inf, Clock())
    retries.lost()
    assert {retries.next_pause_s() for _ in range(5000)} >= {0.0, LONGEST_PAUSE_S}
    assert retries.next_pause_s() == LONGEST_PAUSE_S


def test_the_plan_has_as_many_replicas_as_were_wanted_last() -> None:
    plan = FleetPlan(models=(ModelPlan(name="a", model="a", replicas=2), ModelPlan(name="b", model="b", replicas=1)))
    seen = View(ending=False, models=(ModelView(name="a", wanted=7),), replicas=())
    assert [model.replicas for model in plan_now(plan, seen).models] == [7, 1]
    assert plan_now(plan, None) == plan
