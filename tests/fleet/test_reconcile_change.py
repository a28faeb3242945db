"""Restarts, changed plans, and restored controllers: the fleet reaches its desired state, one by one."""

import pytest

from fleet.control.reconcile import Stop, UnknownName
from fleet.plan import Autoscale
from tests.fleet.reconciled import Fleet, M, but, report, told

# ---- restarts


def test_a_restart_replaces_one_after_the_other_each_when_all_others_serve() -> None:
    fleet = Fleet(M)
    fleet.it.restart("m")
    for name in ("m-2", "m-1", "m-0"):
        assert told(fleet.decide()) == [f"-{name}"]
        assert fleet.decide() == [], "two replicas left at the same time"
        fleet.leave()
        assert told(fleet.decide()) == [f"+{name}"]
        assert fleet.decide() == [], "a replica left before the new one was ready"
        fleet.ready(name)
    assert fleet.decide() == []
    assert fleet.generations() == [1, 1, 1]


def test_with_a_surge_as_many_as_are_wanted_always_serve() -> None:
    fleet = Fleet(but(M, replicas=2))
    fleet.it.restart("m", surge=1)
    assert told(fleet.decide()) == ["+m-2"]
    assert fleet.decide() == []
    fleet.ready()
    assert told(fleet.decide()) == ["-m-1"]
    assert fleet.decide() == []
    fleet.leave()
    assert told(fleet.decide()) == ["+m-1"]
    fleet.ready()
    assert told(fleet.decide()) == ["-m-0"]
    fleet.leave()
    assert fleet.decide() == []
    assert sorted(fleet.there) == ["m-1", "m-2"] and fleet.generations() == [1, 1]


def test_a_new_replica_that_fails_stops_the_restart_until_it_is_well() -> None:
    fleet = Fleet(M)
    fleet.it.restart("m")
    fleet.decide()
    fleet.leave("m-2")
    fleet.decide()
    fleet.failing("m-2")
    assert fleet.decide() == []
    fleet.it.lost("m-2", "its host does not answer")
    assert fleet.decide() == []
    fleet.ready("m-2")
    assert told(fleet.decide()) == ["-m-1"]


def test_an_old_replica_that_fails_is_replaced_first_for_nothing_is_lost_with_it() -> None:
    fleet = Fleet(M)
    fleet.failing("m-0")
    fleet.it.restart("m")
    assert fleet.settle() == ["-m-0", "+m-0", "-m-2", "+m-2", "-m-1", "+m-1"]


# ---- other plans


def test_a_changed_plan_replaces_the_replicas_of_that_model_alone() -> None:
    other = but(M, name="k", replicas=1)
    fleet = Fleet(M, other)
    changed = but(M, options=("--max-num-seqs", "8"))
    fleet.want(changed, other)
    story = fleet.settle()
    assert story == ["-m-2", "+m-2", "-m-1", "+m-1", "-m-0", "+m-0"]
    assert [task.plan for task in fleet.there.values()] == [other, changed, changed, changed]


def test_a_plan_with_another_count_scales_and_one_without_keeps_what_was_scaled() -> None:
    fleet = Fleet(M)
    fleet.it.scale("m", 5)
    fleet.want(M)
    assert fleet.it.count("m") == 5
    fleet.want(but(M, replicas=2))
    assert fleet.it.count("m") == 2
    assert told(fleet.decide()) == ["-m-2"]


def test_the_first_count_lies_within_the_bounds_and_other_bounds_keep_it_as_far_as_they_allow() -> None:
    assert Fleet(but(M, replicas=1, autoscale=Autoscale(min=2, max=8))).it.count("m") == 2
    scaled = but(M, replicas=1, autoscale=Autoscale(min=1, max=8))
    fleet = Fleet(scaled)
    fleet.it.scale("m", 7)
    fleet.want(but(scaled, autoscale=Autoscale(min=1, max=10)))
    assert fleet.it.count("m") == 7
    fleet.want(but(scaled, autoscale=Autoscale(min=1, max=4)))
    assert fleet.it.count("m") == 4
    fleet.want(but(scaled, autoscale=None))
    assert fleet.it.count("m") == 1


def test_what_a_running_replica_can_take_over_replaces_none() -> None:
    foreign = but(M, engine="vllm")
    fleet = Fleet(foreign)
    fleet.want(but(foreign, adapters=("poet",), resume=True, role="both", drain_timeout_s=1.0))
    assert fleet.decide() == []
    assert [member["adapters"] for member in fleet.it.members()] == [["poet"]] * 3
    fleet.it.scale("m", 2)
    assert fleet.decide() == [Stop("m-2", 1.0)]


def test_ours_are_replaced_to_learn_how_long_they_may_drain() -> None:
    fleet = Fleet(M)
    fleet.want(but(M, drain_timeout_s=1.0))
    assert fleet.settle() == ["-m-2", "+m-2", "-m-1", "+m-1", "-m-0", "+m-0"]
    assert {task.plan.drain_timeout_s for task in fleet.there.values()} == {1.0}


def test_a_model_that_is_not_wanted_any_more_leaves() -> None:
    fleet = Fleet(M, but(M, name="k", replicas=1))
    fleet.want(but(M, name="k", replicas=1))
    assert fleet.settle() == ["-m-0", "-m-1", "-m-2"]
    with pytest.raises(UnknownName):
        fleet.it.scale("m", 1)


def test_at_the_end_everything_leaves_and_nothing_is_begun() -> None:
    fleet = Fleet(M, but(M, name="k", replicas=1))
    fleet.it.restart("m", surge=1)
    fleet.decide()
    fleet.it.end()
    assert sorted(told(fleet.decide())) == ["-k-0", "-m-0", "-m-1", "-m-2", "-m-3"]
    fleet.leave()
    assert fleet.decide() == [] and fleet.it.replicas == {} and fleet.it.count("m") == 0


# ---- a node that goes


def draining(fleet: Fleet) -> list[str]:
    return [member["name"] for member in fleet.it.members() if member["draining"]]


def test_what_runs_on_a_node_that_goes_gets_requests_again_on_another_one() -> None:
    fleet = Fleet(M)
    for name, node in (("m-0", "10.0.0.1"), ("m-1", "10.0.0.2"), ("m-2", "10.0.0.2")):
        fleet.it.reported(name, report(name, "starting" if name == "m-2" else "ready", node=node))
    assert fleet.it.drain_node("10.0.0.2") == ["m-1", "m-2"]
    assert fleet.decide() == [], "Ray replaces them once the node is gone; the reconciler does not"
    fleet.it.reported("m-1", report("m-1", "failing", node="10.0.0.2"))
    fleet.restore()
    for name in ("m-0", "m-1", "m-2"):
        fleet.it.reported(name, report(name, node="10.0.0.2"))
    assert draining(fleet) == ["m-1", "m-2"], "restarted or not, they are on the draining node"
    fleet.it.lost("m-1", "no answer")
    fleet.it.reported("m-1", report("m-1", host="another", node="10.0.0.2"))  # the address may be the same
    assert draining(fleet) == ["m-2"]


def test_a_node_that_stays_after_all_gets_requests_again() -> None:
    fleet = Fleet(M)
    fleet.it.reported("m-0", report("m-0", node="10.0.0.1"))
    fleet.it.drain_node("10.0.0.1")
    fleet.it.drain("m-0")
    fleet.it.drain_node("10.0.0.1", wanted=False)
    assert draining(fleet) == ["m-0"], "the operator's own drain stays in place"
    fleet.it.drain_node("10.0.0.1")
    fleet.it.drain("m-0", wanted=False)
    assert draining(fleet) == [], "a replica resumes by name"
    assert fleet.it.drain_node("10.0.0.9") == []


# ---- a controller that comes back


def test_a_restored_controller_restarts_nothing_and_repeats_its_stops() -> None:
    fleet = Fleet(M)
    fleet.it.scale("m", 2)
    fleet.decide()
    fleet.it.drain("m-0")
    fleet.restore()
    assert fleet.decide() == [Stop("m-2", 7.0)]
    fleet.ready("m-0", "m-1")
    assert [member["draining"] for member in fleet.it.members()] == [True, False]
    fleet.leave()
    assert fleet.decide() == []
