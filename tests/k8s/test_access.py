"""Permissions at the API server: none beyond those for finding replicas."""

from copy import deepcopy

import pytest

from tests.k8s.rendered import ON_RAY, VARIANTS, Object, Pod, of_kind, pods, rendered, title

LOOKING = {"get", "list", "watch"}
DISCOVERED = {("", "pods")}


def too_much(objects: list[Object]) -> list[str]:
    """Permissions beyond reading the objects that discovery needs."""
    found = [title(each) for kind in ("ClusterRole", "ClusterRoleBinding") for each in of_kind(objects, kind)]
    for role in of_kind(objects, "Role"):
        for rule in role["rules"]:
            allowed = {(group, kind) for group in rule["apiGroups"] for kind in rule["resources"]}
            found += [f"{title(role)}: {each}" for each in allowed - DISCOVERED]
            found += [f"{title(role)}: {verb}" for verb in set(rule["verbs"]) - LOOKING]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_service_accounts_can_only_look_for_replicas(variant: str) -> None:
    assert not too_much(rendered(variant))


@pytest.mark.parametrize(
    "rule",
    [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["*"], "verbs": ["get"]},
        {"apiGroups": ["*"], "resources": ["pods"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]},
    ],
)
def test_a_rule_that_says_more_is_found(rule: Object) -> None:
    objects = deepcopy(rendered("kind"))
    of_kind(objects, "Role")[0]["rules"].append(rule)
    assert too_much(objects)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_role_is_bound_only_where_routers_discover(variant: str) -> None:
    objects = rendered(variant)
    discovers = any(
        word.startswith("--kubernetes-")
        for pod in pods(objects)
        for each in pod.containers
        for word in each.get("args", [])
    )
    bindings = of_kind(objects, "RoleBinding")
    assert bool(bindings) == discovers
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "warmroute-router", "namespace": "warmroute"}]
        assert binding["roleRef"]["name"] in [role["metadata"]["name"] for role in of_kind(objects, "Role")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_is_mounted_only_where_the_api_server_is_asked(variant: str) -> None:
    """Only routers with discovery use it, and KubeRay's autoscaler, which runs beside the head."""
    objects = rendered(variant)
    accounts = {each["metadata"]["name"]: each for each in of_kind(objects, "ServiceAccount")}
    for pod in pods(objects):
        words = [word for each in pod.containers for word in each.get("args", [])]
        asks = any(word.startswith("--kubernetes-") for word in words)
        asks |= any(each["name"] == "autoscaler" for each in pod.containers)
        asks |= pod.is_a(node="redis-cleanup") and pod.spec["automountServiceAccountToken"]  # as its head has it
        assert pod.spec["automountServiceAccountToken"] is asks, pod.owner
        assert accounts[pod.spec["serviceAccountName"]]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("variant", ON_RAY)
def test_workers_do_not_get_what_kuberay_gives_the_head(variant: str) -> None:
    """Its autoscaler's Role, by which the RayCluster can be changed, is bound to the head's account."""
    accounts = {pod.labels["ray.io/node-type"]: pod.spec["serviceAccountName"] for pod in ray_pods(rendered(variant))}
    assert accounts["worker"] == "warmroute-worker"
    assert list(accounts.values()).count(accounts["worker"]) == 1


def ray_pods(objects: list[Object]) -> list[Pod]:
    return [pod for pod in pods(objects) if "ray.io/node-type" in pod.labels]
