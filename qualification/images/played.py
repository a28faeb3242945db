"""An overlay's pods as `podman play kube` runs them: the same containers on a bridge network, without a cluster."""

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from ipaddress import ip_network
from pathlib import Path

import httpx2
import yaml  # type: ignore[import-untyped]

from qualification.images.podman import inspect, podman
from tests.events.processes import wait_until
from tests.k8s.rendered import Object, Pod

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


class Played:
    """One pod; its container is the manifest's first."""

    def __init__(self, pod: Pod, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._spec = pod.spec
        self._container = pod.spec["containers"][0]
        assert "lifecycle" not in self._container, "Podman runs no preStop hooks"
        self.container = f"{name}-{self._container['name']}"
        self._ports = pod.ports
        self._began_s = time.monotonic()
        self.ready_s = 0.0  # from the start of its pod, with the init container's fetch

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self._ports['http']}"

    def probe(self, name: str) -> bool:
        """Ask as a kubelet asks."""
        probe = self._container[name]
        asked = probe["httpGet"]
        url = f"http://{self.address}:{self._ports[asked['port']]}{asked['path']}"
        try:
            answer = httpx2.get(url, timeout=probe.get("timeoutSeconds", 1), trust_env=False)
        except httpx2.HTTPError:
            return False
        return 200 <= answer.status_code < 400

    def wait_ready(self) -> None:
        wait_until(lambda: self.probe("readinessProbe"), f"{self.name} is ready")
        self.ready_s = self.ready_s or time.monotonic() - self._began_s

    @property
    def restarts(self) -> int:
        return int(inspect("container", self.container)["RestartCount"])

    def stop(self) -> tuple[int, float]:
        """SIGTERM, with the manifest's time to end; return the exit status and the seconds that it took."""
        began_s = time.monotonic()
        podman("stop", f"--time={self._spec['terminationGracePeriodSeconds']}", self.container)
        took_s = time.monotonic() - began_s
        return inspect("container", self.container)["State"]["ExitCode"], took_s

    def crash(self) -> None:
        """SIGKILL from the kernel's side: `podman kill` would count as asked for, and restart nothing."""
        os.kill(inspect("container", self.container)["State"]["Pid"], signal.SIGKILL)

    def execute(self, script: str) -> str:
        return podman("exec", self.container, "sh", "-c", script)


class Network:
    """A bridge network and its pods, found by their names."""

    def __init__(self, folder: Path) -> None:
        self.name = f"warmroute-tests-{os.getpid()}"
        self._folder = folder
        self._pods: list[str] = []
        podman("network", "create", self.name)
        [subnet] = inspect("network", self.name)["subnets"]
        self._addresses: Iterator[str] = (
            str(each) for each in itertools.islice(ip_network(subnet["subnet"]).hosts(), 99, None)
        )

    def address(self) -> str:
        """One that nobody has."""
        return next(self._addresses)

    def play(self, pod: Pod, name: str, image: str, more: Sequence[str] = (), mount: Path | None = None) -> Played:
        played = Played(pod, name, self.address())
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(manifest(pod, name, played.address, image, more, mount)))
        self._pods.append(name)
        podman("play", "kube", f"--network={self.name}", f"--ip={played.address}", str(file))
        return played

    def client(self, image: str, *command: str) -> str:
        """Output of a container that ends by itself."""
        return podman("run", "--rm", f"--network={self.name}", image, *command)

    def close(self) -> None:
        for name in self._pods:
            podman("pod", "rm", "--force", "--ignore", "--time=0", name)
        podman("network", "rm", "--force", self.name)


def manifest(pod: Pod, name: str, address: str, image: str, more: Sequence[str], mount: Path | None) -> Object:
    """The pod without what Podman 4 lacks.

    It fills in no `$(POD_IP)`, lends each container's port to the host, has systemd run the probes, and with the policy
    Always it restarts what has ended well, init containers too.
    """
    spec = deepcopy(pod.spec) | {"restartPolicy": "OnFailure"}
    for each in (*spec.get("initContainers", ()), *spec["containers"]):
        each["image"] = image
    container = spec["containers"][0]
    for key in ("ports", *PROBES):
        del container[key]
    fields = {"status.podIP": address, "metadata.name": name}
    container["env"] = [_filled(each, fields) for each in container["env"]]
    values = {f"$({each['name']})": each["value"] for each in container["env"] if "value" in each}
    container["args"] = [_here(word, values) for word in (*container["args"], *more)]
    if mount is not None:
        container["volumeMounts"].append({"name": "mount", "mountPath": str(mount), "readOnly": True})
        spec["volumes"].append({"name": "mount", "hostPath": {"path": str(mount), "type": "Directory"}})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": dict(pod.labels)}, "spec": spec}


def _filled(variable: Object, fields: dict[str, str]) -> Object:
    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    return variable if path is None else {"name": variable["name"], "value": fields[path]}


def _here(word: str, values: dict[str, str]) -> str:
    for variable, value in values.items():
        word = word.replace(variable, value)
    return word
