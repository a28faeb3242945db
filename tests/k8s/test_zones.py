"""Zones in which Kubernetes may put a router, by the spread that the `ha` overlay asks for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from tests.k8s.rendered import ALL, Pod, pods, rendered

ZONE = "topology.kubernetes.io/zone"
LOST = "node.kubernetes.io/unreachable"


class Node(NamedTuple):
    zone: str
    taint: str | None = None


def router() -> Pod:
    [found] = [pod for pod in pods(rendered("ha")) if pod.is_a(component="router")]
    return found


def open_zones(pod: Pod, nodes: Sequence[Node], running: Sequence[str]) -> set[str]:
    """Zones for one more router, given the zones of the running ones, by the scheduler's PodTopologySpread rules."""
    tolerated = {each.get("key") for each in pod.spec.get("tolerations", ())}
    fit = [node for node in nodes if node.taint is None or node.taint in tolerated]
    allowed = {node.zone for node in fit}
    for each in pod.spec["topologySpreadConstraints"]:
        if each["topologyKey"] == ZONE and each["whenUnsatisfiable"] == "DoNotSchedule":
            counted = fit if each.get("nodeTaintsPolicy", "Ignore") == "Honor" else nodes
            allowed &= _within_skew(each, {node.zone for node in counted}, running)
    return allowed


def _within_skew(constraint: Mapping[str, Any], zones: set[str], running: Sequence[str]) -> set[str]:
    there = Counter({zone: list(running).count(zone) for zone in zones})
    least = min(there.values())
    return {zone for zone in zones if there[zone] + 1 - least <= constraint["maxSkew"]}


THREE = [Node("a"), Node("b"), Node("c")]


def test_routers_are_in_all_zones() -> None:
    assert open_zones(router(), THREE, []) == {"a", "b", "c"}
    assert open_zones(router(), THREE, ["a"]) == {"b", "c"}
    assert open_zones(router(), THREE, ["a", "b"]) == {"c"}


def test_when_a_zone_is_lost_the_others_take_its_routers() -> None:
    """Several routers move: of nine, three in each zone, three have to be replaced."""
    nodes = [Node("a"), Node("b"), Node("c", LOST)]
    assert open_zones(router(), nodes, ["a", "b"]) == {"a", "b"}
    running = ["a", "b"] * 3
    for _ in range(3):
        zone = min(open_zones(router(), nodes, running))
        running.append(zone)
    assert abs(running.count("a") - running.count("b")) <= 1


def test_nodes_for_gpus_alone_are_no_zone_for_routers() -> None:
    nodes = [Node("a"), Node("b"), Node("c", "nvidia.com/gpu")]
    assert open_zones(router(), nodes, ["a", "b"]) == {"a", "b"}


def test_counting_unusable_nodes_would_be_found() -> None:
    pod = router()
    constraints = [each | {"nodeTaintsPolicy": "Ignore"} for each in pod.spec["topologySpreadConstraints"]]
    counting = pod._replace(spec=pod.spec | {"topologySpreadConstraints": constraints})
    assert open_zones(counting, [Node("a"), Node("b"), Node("c", LOST)], ["a", "b"]) == set()


@pytest.mark.parametrize("variant", ["ha", f"ha{ALL}"])
def test_pods_count_as_spread_only_where_they_can_be(variant: str) -> None:
    for pod in pods(rendered(variant)):
        for each in pod.spec.get("topologySpreadConstraints", ()):
            assert each["whenUnsatisfiable"] == "ScheduleAnyway" or each["nodeTaintsPolicy"] == "Honor", pod.owner
