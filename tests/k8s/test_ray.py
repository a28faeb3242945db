"""A RayCluster is started as docs/ray.md has it, by what KubeRay does with it."""

import importlib.util
from pathlib import Path

import pytest

from tests.k8s.commands import lines, variables
from tests.k8s.rendered import ALL, ON_RAY, Object, Pod, of_kind, pods, rendered
from tests.k8s.test_pods import number

TUNED = "RAY_gcs_rpc_server_reconnect_timeout_s", "RAY_health_check_period_ms"


def cluster_of(variant: str) -> Object:
    [cluster] = of_kind(rendered(variant), "RayCluster")
    spec: Object = cluster["spec"]
    return spec


def pod_of(variant: str, node: str) -> Pod:
    [pod] = [pod for pod in pods(rendered(variant)) if pod.is_a(node=node)]
    return pod


def mounts(each: Object) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}


@pytest.mark.parametrize("variant", ON_RAY)
def test_joining_ray_needs_its_token(variant: str) -> None:
    """KubeRay gives it to Ray's own containers, and to no other."""
    assert cluster_of(variant)["authOptions"] == {"mode": "token"}
    [fleet] = [each for each in pod_of(variant, "head").containers if each["name"] == "fleet"]
    assert variables(fleet)["RAY_AUTH_MODE"] == "token"
    [token] = [each for each in fleet["env"] if each["name"] == "RAY_AUTH_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "warmroute", "key": "auth_token"}


@pytest.mark.parametrize("variant", ON_RAY)
def test_the_fleets_keeper_stays_beside_the_head(variant: str) -> None:
    """It is started again also where the pod's own containers are not, and finds Ray's files where Ray has them."""
    head = pod_of(variant, "head")
    [fleet] = [each for each in head.spec["initContainers"] if each["name"] == "fleet"]
    ray = head.spec["containers"][0]
    assert fleet["restartPolicy"] == "Always"
    for path in ("/tmp/ray", "/dev/shm", "/models"):
        assert mounts(fleet)[path] == mounts(ray)[path]
    assert mounts(ray)["/tmp/ray"] == "ray-logs", "KubeRay mounts that one into the autoscaler"
    assert fleet["image"] == ray["image"], "the same Ray and Python"


@pytest.mark.parametrize("variant", ON_RAY)
def test_the_head_takes_no_replicas_and_usage_statistics_are_off(variant: str) -> None:
    spec = cluster_of(variant)
    assert (
        spec["headGroupSpec"]["rayStartParams"]["num-cpus"],
        spec["headGroupSpec"]["rayStartParams"]["num-gpus"],
    ) == (
        "0",
        "0",
    )
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        assert group["rayStartParams"]["disable-usage-stats"] == "true"
    for pod in (pod_of(variant, "head"), pod_of(variant, "worker")):
        for each in pod.containers:
            if each["name"] != "autoscaler":
                assert variables(each)["RAY_USAGE_STATS_ENABLED"] == "0", each["name"]


@pytest.mark.parametrize("variant", ON_RAY)
def test_nodes_outlive_their_head_and_are_given_up_soon(variant: str) -> None:
    for node in ("head", "worker"):
        said = variables(pod_of(variant, node).spec["containers"][0])
        assert [said[name] for name in TUNED] == ["86400", "1000"]


@pytest.mark.parametrize("variant", ON_RAY)
def test_the_kernel_chooses_ports_where_routers_may_go(variant: str) -> None:
    [said] = pod_of(variant, "worker").spec["securityContext"]["sysctls"]
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(rendered(variant), "NetworkPolicy")}
    [rule] = policies["routers-to-workers"]["ingress"]
    [ports] = rule["ports"]
    assert said == {"name": "net.ipv4.ip_local_port_range", "value": f"{ports['port']} {ports['endPort']}"}


@pytest.mark.parametrize("variant", ON_RAY)
def test_a_node_leaves_ray_when_its_replicas_are_done(variant: str) -> None:
    worker = pod_of(variant, "worker")
    [_, _, script] = worker.spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert script.endswith("; ray stop"), "also if nobody could be notified of the drain"
    assert [line.words[0] for line in lines(worker)] == ["drain"]


@pytest.mark.parametrize("variant", ON_RAY)
def test_workers_come_and_go_only_where_gpus_are_dear(variant: str) -> None:
    spec, scaled = cluster_of(variant), variant.removesuffix(ALL) in ("gpu", "ha")
    assert bool(spec.get("enableInTreeAutoscaling")) == scaled
    assert ("autoscalerOptions" in spec) == scaled
    if scaled:
        assert spec["autoscalerOptions"]["version"] == "v2", "Ray's own endpoint, since 2.47"
    [group] = spec["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert (group["minReplicas"] < group["maxReplicas"]) == scaled


@pytest.mark.parametrize("variant", ON_RAY)
def test_a_store_is_there_only_where_it_is_asked_for(variant: str) -> None:
    options = cluster_of(variant).get("gcsFaultToleranceOptions")
    assert (options is not None) == (variant in ("ha", f"ha{ALL}", f"ray-cpu{ALL}"))
    if options is not None:
        assert "value" not in options["redisPassword"], "passwords belong into a Secret"
        assert "externalStorageNamespace" not in options, "the RayCluster's uid keeps it apart from all others"
        for pod in (pod_of(variant, "head"), pod_of(variant, "worker")):
            for each in pod.containers:
                assert "RAY_external_storage_namespace" not in variables(each), "the same setting by another route"


LOGS = 60  # of one pod, all as long as they get


@pytest.mark.parametrize("variant", ON_RAY)
def test_logs_of_ray_end_no_pod(variant: str) -> None:
    """A volume that holds more than it may is the pod's end; what is left is for what else is written there."""
    for node in ("head", "worker"):
        pod = pod_of(variant, node)
        sizes = {each["name"]: each["emptyDir"]["sizeLimit"] for each in pod.spec["volumes"] if "emptyDir" in each}
        for each in pod.containers:
            volume = mounts(each).get("/tmp/ray") or mounts(each)["/tmp"]
            if each["name"] == "autoscaler":  # KubeRay mounts it where this one writes
                volume = "ray-logs"
            said = variables(each)
            files = 1 + int(said["RAY_ROTATION_BACKUP_COUNT"])
            assert LOGS * files * int(said["RAY_ROTATION_MAX_BYTES"]) <= 0.8 * number(sizes[volume]), each["name"]


def test_ray_reads_how_long_its_logs_get() -> None:
    """By these names, in the version that is installed."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None, "present in a developer's environment"
    source = (Path(spec.origin).parent / "_private" / "node.py").read_text()
    assert all(f'"{name}"' in source for name in ("RAY_ROTATION_MAX_BYTES", "RAY_ROTATION_BACKUP_COUNT"))


@pytest.mark.parametrize("variant", ON_RAY)
def test_the_pods_own_first_process_collects_orphans(variant: str) -> None:
    """`ray start` as process 1 would not."""
    for node in ("head", "worker"):
        assert pod_of(variant, node).spec["shareProcessNamespace"] is True, node
