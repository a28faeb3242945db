"""Zones in which Kubernetes may put a router, by the spread that the `ha` overlay asks for."""

import pytest

from tests.k8s.rendered import ALL, pods, rendered

ZONE = "topology.kubernetes.io/zone"


def test_routers_are_in_all_zones_that_have_a_node_for_them() -> None:
    [router] = [pod for pod in pods(rendered("ha")) if pod.is_a(component="router")]
    [zones] = [each for each in router.spec["topologySpreadConstraints"] if each["topologyKey"] == ZONE]
    assert (zones["maxSkew"], zones["whenUnsatisfiable"], zones["nodeTaintsPolicy"]) == (1, "DoNotSchedule", "Honor")


@pytest.mark.parametrize("variant", ["ha", f"ha{ALL}"])
def test_pods_count_as_spread_only_where_they_can_be(variant: str) -> None:
    """A zone that is lost, or has only nodes for GPUs, must not keep routers from the others."""
    for pod in pods(rendered(variant)):
        for each in pod.spec.get("topologySpreadConstraints", ()):
            assert each["whenUnsatisfiable"] == "ScheduleAnyway" or each["nodeTaintsPolicy"] == "Honor", pod.owner
