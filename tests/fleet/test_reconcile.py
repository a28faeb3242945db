"""Numbers of replicas, the order in which they leave, and the members reported to routers."""

from typing import Any

import pytest

from events.native import Load
from fleet.control.reconcile import Begin, Reconciler, Stop, UnknownName, name_stem
from fleet.host.engines import launch
from fleet.host.report import ReplicaAddress, Report
from fleet.plan import Task
from tests.fleet.reconciled import Fleet, M, but, report, told

# ---- counts


def test_a_fleet_begins_what_is_wanted_once() -> None:
    fleet = Fleet(M, but(M, name="k", replicas=1), ready=False)
    actions = fleet.decide()
    assert actions[0] == Begin(Task(name="m-0", plan=M))
    assert told(actions) == ["+m-0", "+m-1", "+m-2", "+k-0"]
    assert fleet.decide() == []
    fleet.ready()
    assert fleet.decide() == []


def test_more_are_begun_and_the_latest_leave_first_when_nothing_else_tells_them_apart() -> None:
    fleet = Fleet(M)
    fleet.it.scale("m", 5)
    assert told(fleet.decide()) == ["+m-3", "+m-4"]
    fleet.ready()
    fleet.it.scale("m", 2)
    assert fleet.decide() == [Stop("m-2", 7.0), Stop("m-3", 7.0), Stop("m-4", 7.0)]
    assert fleet.decide() == []


def test_idle_replicas_leave_first_then_the_least_valuable_caches() -> None:
    fleet = Fleet(but(M, replicas=6))
    for name, hits in (("m-0", 0.1), ("m-1", 0.9), ("m-2", 0.5), ("m-3", 0.9), ("m-4", 0.9), ("m-5", 0.9)):
        load = Load(cached_blocks=10_000)
        asked = report(name, load=load, hit_rate=hits, prompt_tokens_per_s=100.0, block_size=16)
        fleet.it.reported(name, asked)
    fleet.failing("m-1")
    fleet.it.drain("m-3")
    fleet.it.lost("m-4", "its node does not answer")
    order = []
    for count in range(5, 0, -1):
        fleet.it.scale("m", count)
        order += told(fleet.decide())
        fleet.leave()
    assert order == ["-m-1", "-m-3", "-m-4", "-m-0", "-m-2"]


def test_a_name_is_free_again_only_when_its_replica_is_gone() -> None:
    fleet = Fleet(M)
    fleet.it.scale("m", 1)
    assert told(fleet.decide()) == ["-m-1", "-m-2"]
    fleet.it.scale("m", 3)
    assert told(fleet.decide()) == ["+m-3", "+m-4"]
    fleet.leave("m-1")
    fleet.it.scale("m", 4)
    assert told(fleet.decide()) == ["+m-1"]


@pytest.mark.parametrize("name", ["m-0", "m-1"])
def test_a_replica_that_is_gone_by_itself_is_begun_again(name: str) -> None:
    fleet = Fleet(M)
    fleet.gone(name)
    assert fleet.decide() == [Begin(Task(name=name, plan=M))]
    assert [member["name"] for member in fleet.it.members()] == [each for each in ("m-0", "m-1", "m-2") if each != name]
    assert fleet.decide() == []


def test_a_replica_is_begun_with_where_those_that_are_ready_can_be_read() -> None:
    fleet = Fleet(M, but(M, name="other", replicas=1))
    for name in ("m-0", "m-2", "other-0"):
        fleet.it.reported(name, report(name, kv_read=f"tcp://{name}"))
    fleet.failing("m-2")
    fleet.gone("m-1")
    assert fleet.decide() == [Begin(Task(name="m-1", plan=M, warm_from=("tcp://m-0",)))]
    [word] = (word for word in launch(fleet.there["m-1"], "127.0.0.1", "").command if "warm_from" in word)
    assert word == "--set=warm_from=tcp://m-0"


def test_models_with_colliding_names_have_their_own_replicas() -> None:
    fleet = Fleet(but(M, name="a/b", replicas=2), but(M, name="a-b", replicas=2))
    assert [(name, task.plan.name) for name, task in fleet.there.items()] == [
        ("a-b-0", "a/b"),
        ("a-b-1", "a/b"),
        ("a-b-2", "a-b"),
        ("a-b-3", "a-b"),
    ]
    fleet.it.restart("a-b")
    assert fleet.settle() == ["-a-b-3", "+a-b-3", "-a-b-2", "+a-b-2"]
    fleet.it.scale("a/b", 1)
    assert fleet.settle() == ["-a-b-1"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [("qwen3:8b", "qwen3-8b"), ("org/M.x_1", "org-M.x_1"), ("/models/m/", "models-m"), ("模型", "model")],
)
def test_names_of_replicas_are_fit_for_files_and_urls(model: str, expected: str) -> None:
    assert name_stem(model) == expected
    assert told(Fleet(but(M, name=model, replicas=1), ready=False).decide()) == [f"+{expected}-0"]


def test_unknown_names_are_answered_with_those_there_are() -> None:
    it = Fleet(M, but(M, name="k", replicas=0)).it
    with pytest.raises(UnknownName, match="there is no model 'x'; there are m, k"):
        it.scale("x", 1)
    with pytest.raises(UnknownName, match="there is no model 'x'"):
        it.restart("x")
    with pytest.raises(UnknownName, match="there is no replica 'm-9'; there are m-0, m-1, m-2"):
        it.drain("m-9")
    with pytest.raises(UnknownName, match="there are none"):
        Reconciler().scale("m", 1)


# ---- members


def member(fleet: Fleet, name: str) -> dict[str, Any]:
    [found] = [each for each in fleet.it.members() if each["name"] == name]
    return found


def test_routers_hear_of_placed_and_draining_replicas() -> None:
    fleet = Fleet(M, ready=False)
    fleet.decide()
    assert fleet.it.members() == []
    fleet.ready("m-0", "m-1")
    assert member(fleet, "m-0") == {
        "name": "m-0",
        "url": "http://h/m-0",
        "engine": "warmroute",
        "incarnation": "m-0!",
        "draining": False,
    }
    fleet.it.drain("m-0")
    assert member(fleet, "m-0")["draining"]
    fleet.it.drain("m-0", wanted=False)
    assert not member(fleet, "m-0")["draining"]
    fleet.it.reported("m-1", report("m-1", "draining"))
    assert member(fleet, "m-1")["draining"]
    fleet.failing("m-0")
    assert [each["name"] for each in fleet.it.members()] == ["m-1"]


def test_a_leaving_replica_drains_until_it_is_gone() -> None:
    fleet = Fleet(M)
    fleet.it.scale("m", 2)
    fleet.decide()
    assert member(fleet, "m-2")["draining"]
    fleet.leave()
    assert [each["name"] for each in fleet.it.members()] == ["m-0", "m-1"]


def test_a_replica_whose_host_does_not_answer_stays_a_member() -> None:
    fleet = Fleet(M)
    before = fleet.it.members()
    fleet.it.lost("m-1", "its node does not answer")
    assert fleet.it.members() == before
    assert fleet.decide() == []


def test_routers_get_the_facts_that_another_engine_does_not_report() -> None:
    plan = but(M, name="k", replicas=1, engine="vllm", api_key_env="KEY", adapters=("a", "b"), resume=True)
    plan = but(plan, serves="large", role="decode")
    fleet = Fleet(plan, ready=False)
    fleet.decide()
    place = ReplicaAddress(url="http://h:1", model="demo", engine="vllm", events="tcp://h:2", incarnation="1")
    fleet.it.reported("k-0", Report(name="k-0", host="h", life="ready", place=place))
    assert fleet.it.members() == [
        {
            "name": "k-0",
            "url": "http://h:1",
            "engine": "vllm",
            "incarnation": "1",
            "draining": False,
            "model": "large",
            "events": "tcp://h:2",
            "adapters": ["a", "b"],
            "api_key_env": "KEY",
            "resume": True,
            "role": "decode",
        }
    ]


def test_it_is_settled_when_something_was_heard_of_each() -> None:
    fleet = Fleet(M, ready=False)
    settled = [fleet.it.settled]
    fleet.decide()
    settled.append(fleet.it.settled)
    fleet.ready("m-0")
    fleet.failing("m-1")
    settled.append(fleet.it.settled)
    fleet.it.lost("m-2", "no answer")
    settled.append(fleet.it.settled)
    fleet.restore()
    assert [*settled, fleet.it.settled] == [True, False, False, True, False]
