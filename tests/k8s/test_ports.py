"""Servers listen on the manifests' ports, answer their probes and know Ray's options."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.k8s.commands import values_of, variables
from tests.k8s.policies import selects
from tests.k8s.rendered import ON_RAY, ROOT, VARIANTS, Object, Pod, of_kind, pods, rendered, title


def served_by(each: Object) -> dict[str, int]:
    """Ports of a container's server, by its arguments."""
    words = dict(word.split("=", 1) for word in each.get("args", []) if word.startswith("--") and "=" in word)
    found = {"http": int(words["--port"])} if "--port" in words else {}
    if "--events-port" in words:
        first = int(words["--events-port"])
        found |= {"events": first, "replay": first + 1, "status": first + 2, "snapshot": first + 3}
    if "--peer-listen" in words:
        found["peers"] = port_of(words["--peer-listen"])
    if "--kv-port" in words:
        found["kv"] = int(words["--kv-port"])
    if "--kv-events-config" in each.get("args", []):
        said = json.loads(each["args"][each["args"].index("--kv-events-config") + 1])
        found |= {"events": port_of(said["endpoint"]), "replay": port_of(said["replay_endpoint"])}
    return found


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_ports_of_containers_are_those_that_their_words_say(variant: str) -> None:
    plain = [pod for pod in pods(rendered(variant)) if "ray.io/cluster" not in pod.labels]
    assert plain
    for pod in plain:
        for each in pod.spec["containers"]:
            assert {port["name"]: port["containerPort"] for port in each["ports"]} == served_by(each), pod.owner


@pytest.mark.parametrize("variant", VARIANTS)
def test_services_lead_to_ports_that_are_there(variant: str) -> None:
    objects = rendered(variant)
    for service in of_kind(objects, "Service"):
        chosen = [pod for pod in pods(objects) if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        assert chosen, title(service)
        for pod in chosen:
            for port in service["spec"]["ports"]:
                target = port["targetPort"]
                number = pod.ports.get(target) if isinstance(target, str) else target
                assert number == port["port"] and number in pod.ports.values(), (title(service), port)


@pytest.mark.parametrize("variant", ON_RAY)
def test_the_head_has_the_ports_that_ray_and_the_fleet_are_told(variant: str) -> None:
    [cluster] = of_kind(rendered(variant), "RayCluster")
    params = cluster["spec"]["headGroupSpec"]["rayStartParams"]
    [head] = [pod for pod in pods(rendered(variant)) if pod.is_a(node="head")]
    assert head.ports["gcs-server"] == int(params["port"])
    assert head.ports["metrics"] == int(params["metrics-export-port"])
    up = values_of(variant, "up")
    assert head.ports["fleet"] == up["controller_port"]
    assert up["address"] == f"10.0.0.7:{params['port']}"
    [service] = [
        each for each in of_kind(rendered(variant), "Service") if each["metadata"]["name"] == "warmroute-fleet"
    ]
    registry = f"http://warmroute-fleet:{service['spec']['ports'][0]['port']}"
    assert values_of(variant, "router")["registry"] == registry
    [worker] = [pod for pod in pods(rendered(variant)) if pod.is_a(node="worker")]
    assert variables(worker.spec["containers"][0])["WARMROUTE_FLEET"] == registry


@pytest.mark.parametrize("variant", ON_RAY)
def test_the_version_of_ray_is_that_of_the_images(variant: str) -> None:
    """The images install the packages of constraints.txt."""
    [cluster] = of_kind(rendered(variant), "RayCluster")
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("variant", ON_RAY)
def test_what_ray_is_started_with_are_its_options(variant: str) -> None:
    from ray.scripts.scripts import start as ray_start  # it takes a second

    known = {name.removeprefix("--") for param in ray_start.params for name in param.opts}
    [cluster] = of_kind(rendered(variant), "RayCluster")
    for group in [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]:
        assert set(group["rayStartParams"]) <= known, set(group["rayStartParams"]) - known
    for pod in pods(rendered(variant)):
        ray = pod.spec["containers"][0]
        for name in variables(ray):
            assert not name.startswith("RAY_") or name in RAY_VARIABLES, name


RAY_VARIABLES = {
    name for line in (ROOT / "docs" / "ray.md").read_text().splitlines() for name in re.findall(r"\bRAY_\w+", line)
} | {"RAY_USAGE_STATS_ENABLED", "RAY_ROTATION_MAX_BYTES", "RAY_ROTATION_BACKUP_COUNT"}


def routes_of(command: str) -> set[str]:
    """Paths that a server answers without a key, read from its page."""
    page = {"router": "router.md", "replica": "replica.md"}[command]
    return set(re.findall(r"`(?:GET )?(/(?:health|ready|metrics))`", (ROOT / "docs" / page).read_text()))


def probes(each: Object) -> Iterator[Object]:
    yield from (each[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness") if f"{kind}Probe" in each)


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_what_the_server_answers(variant: str) -> None:
    for pod in pods(rendered(variant)):
        for each in pod.spec["containers"]:
            for probe in probes(each):
                assert may_ask(pod, each, probe), (pod.owner, probe)


def may_ask(pod: Pod, each: Object, probe: Object) -> bool:
    if "ray.io/cluster" in pod.labels:
        [agent, store, node] = [6704, 6379, 6701]
        http = probe.get("httpGet", {"path": "/api/healthz", "port": agent})
        return http == {"path": "/api/healthz", "port": agent} and probe.get("tcpSocket", {"port": store})["port"] in (
            store,
            node,
        )
    asked = probe["httpGet"]
    known = routes_of(each["args"][0]) if each["command"] == ["warmroute"] else {"/health"}
    return asked["port"] in pod.ports and asked["path"] in known


@pytest.mark.parametrize("variant", VARIANTS)
def test_routers_and_replicas_are_ready_when_they_say_so(variant: str) -> None:
    for pod in pods(rendered(variant)):
        for each in pod.spec["containers"]:
            if each.get("command") == ["warmroute"]:
                assert each["readinessProbe"]["httpGet"]["path"] == "/ready"
                assert each["livenessProbe"]["httpGet"]["path"] == "/health", "liveness must not depend on replicas"
