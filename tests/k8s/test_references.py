"""Every name in the manifests resolves: pods of selectors, Secrets and accounts, mounted files."""

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.k8s.policies import selects
from tests.k8s.rendered import VARIANTS, Object, Pod, of_kind, pods, rendered, title

# Objects of the user, and of KubeRay (the token of the RayCluster `warmroute`).
OTHERS = {
    "Secret": {
        "warmroute-keys": {"admin-key", "keys.toml"},
        "warmroute-fleet": {"fleet-key"},
        "warmroute-replicas": {"api-key", "kv-secret"},
        "warmroute-hub": {"token"},
        "warmroute-peers": {"routers.key_secret"},
        "warmroute-curve": {"replica.key", "replica.key_secret", "router.key", "router.key_secret"},
        "warmroute-redis": {"password"},
        "warmroute-tls": {"tls.crt", "tls.key"},
        "warmroute": {"auth_token"},
    }
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_choose_pods_that_there_are(variant: str) -> None:
    objects = rendered(variant)
    everybody = pods(objects)
    for each in objects:
        for selector in selectors_of(each):
            assert any(selects(selector, pod.labels) for pod in everybody), title(each)
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert f"{target['kind']}/{target['name']}" in [title(each) for each in objects]


def selectors_of(each: Object) -> Iterator[Object]:
    if each["kind"] in ("Deployment", "PodDisruptionBudget"):
        yield each["spec"]["selector"]
    if each["kind"] == "Service":
        yield {"matchLabels": each["spec"]["selector"]}
    for pod in pods([each]):
        for constraint in pod.spec.get("topologySpreadConstraints", []):
            yield constraint["labelSelector"]


def test_every_policy_and_monitor_selects_a_pod_in_some_overlay() -> None:
    used: dict[str, bool] = {}
    for variant in VARIANTS:
        objects = rendered(variant)
        for each in objects:
            for what, selector, labels in parties(each, objects):
                key = f"{title(each)} {what} {json.dumps(selector, sort_keys=True)}"
                used[key] = used.get(key, False) or any(selects(selector, one) for one in labels)
    assert not [key for key, found in used.items() if not found]


def parties(each: Object, objects: list[Object]) -> Iterator[tuple[str, Object, list[Any]]]:
    """Selectors of policies within the namespace, and of monitors by port, with the labels that they choose among."""
    of_pods = [pod.labels for pod in pods(objects)]
    if each["kind"] == "NetworkPolicy":
        yield "for", each["spec"]["podSelector"], of_pods
        rules = [*each["spec"].get("ingress", []), *each["spec"].get("egress", [])]
        for peer in [peer for rule in rules for peer in [*rule.get("from", []), *rule.get("to", [])]]:
            if "podSelector" in peer and "namespaceSelector" not in peer:
                yield "peer", peer["podSelector"], of_pods
    if each["kind"] == "PodMonitor":
        for port in [endpoint["port"] for endpoint in each["spec"]["podMetricsEndpoints"]]:
            yield port, each["spec"]["selector"], [pod.labels for pod in pods(objects) if port in pod.ports]
    if each["kind"] == "ServiceMonitor":
        for endpoint in each["spec"]["endpoints"]:
            services = [
                service["metadata"]["labels"]
                for service in of_kind(objects, "Service")
                if endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
            ]
            yield endpoint["port"], each["spec"]["selector"], services


def references(node: Any) -> Iterator[tuple[str, str, str | None]]:
    """Kind, name, and the key where there is one, of everything that is referred to by name."""
    if isinstance(node, list):
        for each in node:
            yield from references(each)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        match key, value:
            case "secretKeyRef", {"name": str(name), "key": str(entry)}:
                yield "Secret", name, entry
            case "configMapKeyRef", {"name": str(name), "key": str(entry)}:
                yield "ConfigMap", name, entry
            case "secret", {"secretName": str(name), "items": list(items)}:
                yield from (("Secret", name, item["key"]) for item in items)
            case "secretName", str(name):
                yield "Secret", name, None
            case "configMap", {"name": str(name)}:
                yield "ConfigMap", name, None
            case "claimName", str(name):
                yield "PersistentVolumeClaim", name, None
            case "serviceAccountName", str(name):
                yield "ServiceAccount", name, None
            case "backendRefs", list(services):
                yield from (("Service", each["name"], None) for each in services)
            case "service", {"name": str(name)}:
                yield "Service", name, None
            case _:
                yield from references(value)


def missing(objects: list[Object]) -> list[tuple[str, str, str | None]]:
    made = {(each["kind"], each["metadata"]["name"]) for each in objects}
    return [
        (kind, name, key)
        for kind, name, key in references(objects)
        if (kind, name) not in made
        and (name not in OTHERS.get(kind, {}) or (key is not None and key not in OTHERS[kind][name]))
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_references_lead_to_objects_made_here_or_by_known_operators(variant: str) -> None:
    assert list(references(rendered(variant)))
    assert not missing(rendered(variant))


def test_everything_that_others_are_to_make_is_referred_to() -> None:
    used = {(kind, name, key) for variant in VARIANTS for kind, name, key in references(rendered(variant))}
    for kind, names in OTHERS.items():
        for name, keys in names.items():
            told = {key for a, b, key in used if (a, b) == (kind, name)}
            assert told == {None} or told == keys, (kind, name)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("serviceAccountName",), "warmroute-routers"),
        (("containers", 0, "env", 1, "valueFrom", "secretKeyRef", "name"), "warmroute-key"),
        (("containers", 0, "env", 1, "valueFrom", "secretKeyRef", "key"), "admin_key"),
        (("volumes", 0), {"name": "tmp", "persistentVolumeClaim": {"claimName": "tmp"}}),
        (("volumes", 0), {"name": "tmp", "configMap": {"name": "tmp"}}),
    ],
)
def test_a_reference_to_nothing_is_found(path: tuple[str | int, ...], value: object) -> None:
    objects = deepcopy(rendered("kind"))
    [router] = [each for each in of_kind(objects, "Deployment") if each["metadata"]["name"] == "warmroute-router"]
    node: Any = router["spec"]["template"]["spec"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert missing(objects)


# ---- files that pods are to have


def files_of(pod: Pod, each: Object, objects: list[Object]) -> set[str]:
    """Files that a container's volumes of Secrets and ConfigMaps provide."""
    maps = {one["metadata"]["name"]: one["data"] for one in of_kind(objects, "ConfigMap")}
    volumes: dict[str, Callable[[], list[str]]] = {}
    for volume in pod.spec["volumes"]:
        if "secret" in volume:
            volumes[volume["name"]] = lambda secret=volume["secret"]: [item["path"] for item in secret["items"]]  # type: ignore[misc]
        if "configMap" in volume:
            volumes[volume["name"]] = lambda config=volume["configMap"]: list(maps[config["name"]])  # type: ignore[misc]
    mounts = [mount for mount in each["volumeMounts"] if mount["name"] in volumes]
    return {f"{mount['mountPath']}/{name}" for mount in mounts for name in volumes[mount["name"]]()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_that_words_name_are_mounted(variant: str) -> None:
    objects = rendered(variant)
    for pod in pods(objects):
        for each in pod.containers:
            there = files_of(pod, each, objects)
            for word in each.get("args", []):
                for path in re.findall(r"/etc/warmroute/[\w./]+", word):
                    assert any(file == path or file.startswith(f"{path}/") for file in there), (pod.owner, path)
