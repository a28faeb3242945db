"""A fleet on Ray, started as the manifests say, on machines of its own: policies deny none of its connections."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.chaos.nodes import Node, network, no_nodes
from tests.chaos.ray_starts import WITHIN_S, RayStart
from tests.events.processes import wait_until
from tests.k8s.commands import lines, variables
from tests.k8s.policies import Rules, place_of
from tests.k8s.rendered import Object, Pod, of_kind, pods, rendered
from tests.k8s.sockets import Connection, Seen, watched

why_not = no_nodes()
pytestmark = [
    pytest.mark.grid,
    pytest.mark.timeout(900),  # three starts of Ray, and one of a fleet on it
    pytest.mark.skipif(why_not is not None, reason=why_not or ""),
]

OVERLAY = "ray-cpu"
RAY = str(Path(sys.executable).with_name("ray"))
SECRETS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-that-all-nodes-of-the-test-have"}
FREE = range(32768, 61000)  # where the kernel puts replicas
SOCKETS = ("events", "replay", "status", "snapshot")


class Machines(NamedTuple):
    head: Node
    router: Node
    workers: list[Node]
    seen: Seen


def started_by_kuberay(params: Object, *more: str) -> list[str]:
    """Command of rayStartParams, in the way of KubeRay's convertParamMap."""
    words = [RAY, "start", *more, "--block"]
    for name, value in sorted(params.items()):
        switch = value in ("true", "false") and name != "include-dashboard"
        words += [f"--{name}"] * (value == "true") if switch else [f"--{name}={value}"]
    return words


class Manifests:
    """Pods of the overlay, and their commands in this test."""

    def __init__(self, folder: Path, head: Node) -> None:
        self.objects = rendered(OVERLAY)
        self._folder, self._address = folder, head.address
        self._fleet = folder / "fleet.toml"
        [config] = of_kind(self.objects, "ConfigMap")  # simulated: it is about connections
        self._fleet.write_text(config["data"]["fleet.toml"] + 'engine = "simulated"\n')
        [self.cluster] = of_kind(self.objects, "RayCluster")
        self.pods = {pod.labels.get("ray.io/node-type", "router"): pod for pod in pods(self.objects)}

    def environment(self, pod: Pod, address: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "WARMROUTE_"))}
        homes = {"HOME", "HF_HOME", "WARMROUTE_CACHE_DIR"}
        said = {name: value for name, value in variables(pod.spec["containers"][0]).items() if name not in homes}
        here = {"POD_IP": address, "WARMROUTE_FLEET_KEY": "key-of-the-fleet", "WARMROUTE_FLEET": self.controller}
        return inherited | said | here | SECRETS

    @property
    def store(self) -> str:
        return f"{self._address}:6379"

    @property
    def controller(self) -> str:
        return f"http://{self._address}:8790"

    def words(self, pod: Pod, command: str) -> list[str]:
        """Command line of one of our programs, with the files and addresses of this test."""
        [line] = [line for line in lines(pod) if line.words[0] == command]
        return [sys.executable, "-m", "fleet", *(self._here(word) for word in line.words)]

    def _here(self, word: str) -> str:
        for there, here in {
            "10.0.0.7": self._address,
            "http://warmroute-fleet:8790": self.controller,
            "/etc/warmroute/fleet.toml": str(self._fleet),
            "/models/demo": str(self._folder / "demo"),
        }.items():
            word = word.replace(there, here)
        return word


@contextmanager
def begun(folder: Path) -> Iterator[tuple[Machines, Manifests]]:
    with network(4) as [head, router, *workers]:
        manifests = Manifests(folder, head)
        spec = manifests.cluster["spec"]
        with watched([head, router, *workers]) as seen:
            machines = Machines(head, router, workers, seen)
            start_node(manifests, folder, head, spec["headGroupSpec"]["rayStartParams"])
            for node in workers:  # one after the other: they would take each other's time
                start_node(manifests, folder, node, spec["workerGroupSpecs"][0]["rayStartParams"])
            pod = manifests.pods["head"]
            environment = manifests.environment(pod, head.address)
            head.start(manifests.words(pod, "up"), folder / "up.log", env=environment)
            pod = manifests.pods["router"]
            environment = manifests.environment(pod, router.address)
            fetched = router.run(manifests.words(pod, "fetch"), env=environment)
            assert fetched.returncode == 0, fetched.stderr
            router.start(manifests.words(pod, "router"), folder / "router.log", env=environment)
            yield machines, manifests


def start_node(manifests: Manifests, folder: Path, node: Node, params: Object) -> None:
    """Start Ray on the head, or on a worker of it."""
    is_head = "port" in params
    place = ("--node-ip-address", node.address, "--temp-dir", str(folder / node.address))
    where = ("--head",) if is_head else ("--address", manifests.store)
    log = folder / f"ray-{node.address}.log"
    environment = manifests.environment(manifests.pods["head" if is_head else "worker"], node.address)
    RayStart(node, started_by_kuberay(params, *where, *place), log, environment).wait()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Machines, Manifests, list[Any]]]:
    """A fleet that has answered, and of which one node was drained; and its members before that."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="n-"))  # short: the path of a socket goes below it
    try:
        with begun(folder) as (machines, manifests):
            members = use(machines, manifests)
            yield machines, manifests, members
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def use(machines: Machines, manifests: Manifests) -> list[Any]:
    with machines.router.inside(), httpx2.Client(base_url="http://127.0.0.1:8000", trust_env=False, timeout=30) as http:
        wait_until(lambda: is_ready(http), "the router is ready", WITHIN_S)  # Ray starts more, and that the replicas
        members = httpx2.get(f"{manifests.controller}/members?wait=0", trust_env=False).json()["members"]
        asked = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        for _ in range(20):
            assert http.post("/v1/chat/completions", json=asked).status_code == 200
    [node, *_] = machines.workers
    pod = manifests.pods["worker"]
    drain = [word.replace(machines.head.address, node.address) for word in manifests.words(pod, "drain")]
    drained = node.run(drain, env=manifests.environment(pod, node.address))
    assert drained.returncode == 0, drained.stderr
    return list(members)


def is_ready(http: httpx2.Client) -> bool:
    with suppress(httpx2.HTTPError):
        return http.get("/ready").status_code == 200 and len(http.get("/replicas").json()["replicas"]) == 2
    return False


def denied(machines: Machines, manifests: Manifests, objects: list[Object]) -> set[tuple[str, str, int]]:
    """Observed connections that policies deny, by the kinds of their ends."""
    rules = Rules.at_least(objects)
    kinds = {machines.head.address: "head", machines.router.address: "router"}
    kinds |= {node.address: "worker" for node in machines.workers}
    named = {Connection(kinds[each.source], kinds[each.target], each.port) for each in machines.seen.connections()}
    places = {kind: place_of(pod) for kind, pod in manifests.pods.items()}
    return {each for each in named if not rules.allow(places[each.source], places[each.target], each.port)}


def test_all_connections_of_a_fleet_are_allowed(served: tuple[Machines, Manifests, list[Any]]) -> None:
    machines, manifests, members = served
    assert len(members) == 2
    assert not denied(machines, manifests, manifests.objects)


def test_without_its_policy_for_workers_a_fleet_would_be_cut(served: tuple[Machines, Manifests, list[Any]]) -> None:
    machines, manifests, _ = served
    ways = {
        "ray": {("worker", "head"), ("head", "worker")},
        "fleet-controller": {("router", "head"), ("worker", "head")},
        "routers-to-workers": {("router", "worker")},
    }
    for name, cut in ways.items():
        objects = [each for each in deepcopy(manifests.objects) if each["metadata"]["name"] != name]
        assert {(source, target) for source, target, _ in denied(machines, manifests, objects)} == cut, name


def test_ports_of_replicas_are_apart_from_those_of_ray(served: tuple[Machines, Manifests, list[Any]]) -> None:
    """On workers, only replicas listen on ports outside of rayStartParams."""
    machines, manifests, members = served
    [group] = manifests.cluster["spec"]["workerGroupSpecs"]
    params = {name: int(value) for name, value in group["rayStartParams"].items() if name.endswith("-port")}
    of_ray = {*params.values(), *range(params["min-worker-port"], params["max-worker-port"] + 1)}
    of_replicas = {int(each["url"].rpartition(":")[2]) for each in members}
    of_replicas |= {int(each[name].rpartition(":")[2]) for each in members for name in SOCKETS if each.get(name)}
    assert len(of_replicas) >= 2 and all(port in FREE for port in of_replicas)
    for node in machines.workers:
        others = machines.seen.listening[node.address] - of_ray
        assert all(port in FREE for port in others), others
