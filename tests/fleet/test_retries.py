"""A lost fleet that is started again: the pauses, and the replicas."""

from fleet.control.record import ModelView, View
from fleet.plan import FleetPlan, ModelPlan
from fleet.up.running import pause_s, plan_now


def test_the_first_try_is_at_once_and_each_later_one_waits_twice_as_long_up_to_a_bound() -> None:
    assert [pause_s(tries) for tries in (0, 1, 2, 3, 4, 9, 5000)] == [0.0, 0.5, 1.0, 2.0, 4.0, 30.0, 30.0]


def test_the_plan_has_as_many_replicas_as_were_wanted_last() -> None:
    plan = FleetPlan(models=(ModelPlan(name="a", model="a", replicas=2), ModelPlan(name="b", model="b", replicas=1)))
    seen = View(ending=False, models=(ModelView(name="a", wanted=7),), replicas=())
    assert [model.replicas for model in plan_now(plan, seen).models] == [7, 1]
    assert plan_now(plan, None) == plan
