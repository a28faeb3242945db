"""A real API server ($KUBEBUILDER_ASSETS) enforces the Role of the manifests for routers."""

from collections.abc import Iterator
from typing import Any

import pytest

from qualification.kubernetes.real import RealApi, checked, needing_a_cluster, real_api
from tests.k8s.rendered import NAMESPACE, of_kind, rendered

pytestmark = needing_a_cluster()

ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/warmroute"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
ROUTER = {"Impersonate-User": f"system:serviceaccount:{NAMESPACE}:warmroute-router"}
REPLICA = {"Impersonate-User": f"system:serviceaccount:{NAMESPACE}:warmroute-replica"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApi]:
    """API server with the Role and RoleBinding of an overlay whose routers discover replicas."""
    objects = rendered("kind")
    with real_api(tmp_path_factory.mktemp("kubernetes")) as made, made.asking() as client:
        checked(client.post("/api/v1/namespaces", json={"metadata": {"name": NAMESPACE}}))
        checked(client.post(f"{ROLES}/roles", json=of_kind(objects, "Role")[0]))
        checked(client.post(f"{ROLES}/rolebindings", json=of_kind(objects, "RoleBinding")[0]))
        yield made


def may(api: RealApi, who: dict[str, str], verb: str, what: str, namespace: str = NAMESPACE) -> bool:
    """Ask the API server for a permission; `what` is a resource, after its group and a slash if it has one."""
    group, _, resource = what.rpartition("/")
    attributes = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
    with api.asking() as client:
        answer: Any = checked(client.post(REVIEWS, json={"spec": {"resourceAttributes": attributes}}, headers=who))
    return bool(answer["status"]["allowed"])


def test_routers_may_look_for_replicas_in_their_namespace(api: RealApi) -> None:
    for verb in ("get", "list", "watch"):
        assert may(api, ROUTER, verb, "pods")
        assert not may(api, ROUTER, verb, "pods", namespace="default")
        assert not may(api, REPLICA, verb, "pods")


def test_routers_may_change_nothing(api: RealApi) -> None:
    changes = ("create", "update", "patch", "delete", "deletecollection")
    assert not any(may(api, ROUTER, verb, "pods") for verb in changes)


@pytest.mark.parametrize(
    "what", ["secrets", "configmaps", "services", "nodes", "apps/deployments", "ray.io/rayclusters"]
)
def test_routers_may_not_look_at_anything_else(what: str, api: RealApi) -> None:
    assert not any(may(api, ROUTER, verb, what) for verb in ("get", "list", "watch", "create"))
