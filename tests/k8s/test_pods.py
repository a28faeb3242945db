"""Every pod complies with the restricted profile, declares its resources, and has the time to end."""

from copy import deepcopy

import pytest

from tests.k8s.rendered import VARIANTS, Object, Pod, of_kind, pods, rendered
from tests.k8s.restricted import violations

AFTER_PRE_STOP_S = 60.0 + 30.0  # of a node of Ray: drain_timeout of its replicas, and how long Ray waits for its tasks
MARGIN_S = 10.0  # for the time after a drain: the last answers, the process' own end
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def number(quantity: str) -> float:
    return float(quantity[:-2]) * UNITS[quantity[-2:]] if quantity[-2:] in UNITS else float(quantity)


# ---- security


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_complies_with_the_restricted_profile(variant: str) -> None:
    [namespace] = of_kind(rendered(variant), "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(rendered(variant)):
        assert not violations(pod), pod.owner


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_container_has_a_root_that_cannot_be_written(variant: str) -> None:
    for pod in pods(rendered(variant)):
        assert pod.spec["securityContext"]["runAsUser"] == 10001
        assert pod.spec["enableServiceLinks"] is False
        for each in pod.containers:
            assert each["securityContext"]["readOnlyRootFilesystem"] is True, each["name"]
            mounts = {mount["mountPath"] for mount in each["volumeMounts"]}
            assert "/tmp" in mounts, f"{each['name']} has no writable volume"
            assert {"name": "HOME", "value": "/tmp"} in each["env"], each["name"]


def with_changed(pod: Pod, context: Object) -> Pod:
    spec = deepcopy(pod.spec)
    spec["containers"][0]["securityContext"] |= context
    return pod._replace(spec=spec)


@pytest.mark.parametrize(
    "context",
    [
        {"privileged": True},
        {"allowPrivilegeEscalation": True},
        {"runAsNonRoot": False},
        {"runAsUser": 0},
        {"capabilities": {"drop": ["NET_RAW"]}},
        {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
        {"seccompProfile": {"type": "Unconfined"}},
    ],
)
def test_a_pod_that_asks_for_more_is_found(context: Object) -> None:
    for pod in pods(rendered("ray-cpu")):
        assert violations(with_changed(pod, context)), pod.owner


def test_a_folder_of_the_host_is_found() -> None:
    pod = pods(rendered("kind"))[0]
    spec = pod.spec | {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}
    assert violations(pod._replace(spec=spec)) == ["volume root is of hostPath"]


# ---- resources


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_container_says_what_it_takes_and_its_memory_has_a_limit(variant: str) -> None:
    for pod in pods(rendered(variant)):
        for each in pod.containers:
            resources = each["resources"]
            assert set(resources["requests"]) >= {"cpu", "memory"}, each["name"]
            assert number(resources["limits"]["memory"]) >= number(resources["requests"]["memory"])
            if each["name"] != "wait-gcs-ready":  # KubeRay's own
                assert "cpu" not in resources["limits"], f"{each['name']} would be rejected"


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_memory_fits_into_the_memory_that_it_counts_as(variant: str) -> None:
    for pod in pods(rendered(variant)):
        sizes = {v["name"]: v["emptyDir"]["sizeLimit"] for v in pod.spec["volumes"] if "emptyDir" in v}
        memory = [v["name"] for v in pod.spec["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
        for each in pod.spec["containers"]:
            shared = sum(number(sizes[m["name"]]) for m in each["volumeMounts"] if m["name"] in memory)
            assert shared <= number(each["resources"]["limits"]["memory"]) / 2, pod.owner


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_mount_has_its_volume(variant: str) -> None:
    for pod in pods(rendered(variant)):
        volumes = [volume["name"] for volume in pod.spec["volumes"]]
        assert len(set(volumes)) == len(volumes)
        for each in pod.containers:
            names = {mount["name"] for mount in each["volumeMounts"]}
            assert names <= set(volumes), (pod.owner, each["name"])
            paths = [mount["mountPath"] for mount in each["volumeMounts"]]
            assert len(set(paths)) == len(paths), (pod.owner, each["name"])


# ---- time to end


def seconds(words: list[str], option: str) -> float:
    given = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return float(given[-1]) if given else 0.0


def time_to_end_s(each: Object) -> float:
    """Seconds that the preStop hook and then the process may wait."""
    words = each.get("args", [])
    before = each.get("lifecycle", {}).get("preStop", {})
    waited = float(before.get("sleep", {}).get("seconds", 0))
    script = " ".join(before.get("exec", {}).get("command", [])).split()
    waited += float(script[script.index("--wait") + 1].rstrip(";")) if "--wait" in script else 0.0
    return waited + seconds(words, "--drain-delay") + seconds(words, "--drain-timeout")


def too_short(pod: Pod) -> bool:
    longest = max(time_to_end_s(each) for each in pod.containers)
    longest += AFTER_PRE_STOP_S if pod.is_a(node="worker") else 0.0
    return bool(pod.spec["terminationGracePeriodSeconds"] < longest + MARGIN_S)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_has_more_time_to_end_than_its_drain_takes(variant: str) -> None:
    for pod in pods(rendered(variant)):
        assert not too_short(pod), pod.owner
        if pod.is_a(component="router"):
            assert seconds(pod.spec["containers"][0]["args"], "--drain-delay") == 10
        if pod.is_a(component="router") or pod.is_a(component="replica") or pod.is_a(node="worker"):
            assert max(time_to_end_s(each) for each in pod.containers) >= 60, "preStop does not drain"


@pytest.mark.parametrize("variant", ["kind", "ray-cpu", "vllm"])
def test_too_little_time_is_found(variant: str) -> None:
    for pod in pods(rendered(variant)):
        if not pod.is_a(node="head"):
            assert too_short(pod._replace(spec=pod.spec | {"terminationGracePeriodSeconds": 60}))


# ---- being there


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_new_router_is_there_before_an_old_one_goes(variant: str) -> None:
    [router] = [each for each in of_kind(rendered(variant), "Deployment") if "router" in each["metadata"]["name"]]
    assert router["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    [scaler] = of_kind(rendered(variant), "HorizontalPodAutoscaler")
    assert "replicas" not in router["spec"], "each apply would undo the autoscaler"
    assert scaler["spec"]["minReplicas"] >= (3 if variant.startswith("ha") else 2)
    keys = [each["topologyKey"] for each in router["spec"]["template"]["spec"]["topologySpreadConstraints"]]
    assert ("topology.kubernetes.io/zone" in keys) == variant.startswith("ha")
    assert "kubernetes.io/hostname" in keys


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_container_that_serves_is_asked_whether_it_does(variant: str) -> None:
    for pod in pods(rendered(variant)):
        for each in pod.spec["containers"]:
            if each["name"] != "autoscaler" and not pod.is_a(node="redis-cleanup"):
                assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(each), (pod.owner, each["name"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_image_is_the_latest(variant: str) -> None:
    for pod in pods(rendered(variant)):
        for each in pod.containers:
            tag = each["image"].rpartition(":")[2]
            assert tag not in (each["image"], "latest"), each["image"]
