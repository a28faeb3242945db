"""Pods of the smallest overlay in containers: routers, and replicas that they find in a file."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from qualification.images.played import Network, Played
from tests.events.processes import wait_until
from tests.k8s.load import SIMULATED
from tests.k8s.rendered import Pod, pods, rendered

ROUTER, REPLICA_CPU = "warmroute-router:tests", "warmroute-replica-cpu:tests"
REPLICA, CLIENT = "warmroute-simulated:tests", "warmroute-client:tests"
FOUND = "--kubernetes-pods=app.kubernetes.io/component=replica"


class Engine(NamedTuple):
    """A replica's pod, its image, and arguments that its manifest does not have."""

    pod: Pod
    image: str
    arguments: Sequence[str]


def computes() -> Engine:
    """The overlay's own pod, unchanged."""
    return Engine(of_overlay("kind", "replica"), REPLICA_CPU, ())


def simulates() -> Engine:
    """With the tokenizer that routers fetch; the engine that computes makes the demo model itself."""
    replica = of_overlay("kind", "replica")
    pod = replica._replace(spec=replica.spec | {"initContainers": of_overlay("kind", "router").spec["initContainers"]})
    return Engine(pod, REPLICA, (*SIMULATED, "--tokenizer=/models/demo"))


class World:
    """A router and its replicas."""

    def __init__(self, network: Network, folder: Path, engine: Engine) -> None:
        self.network = network
        self._folder, self._file = folder, folder / "replicas.toml"
        self._numbers = count(1)
        self._engine = engine
        self.replicas = [self.replica(), self.replica()]
        self.announce()
        self.router = self.another_router("warmroute-router")
        pods_ready = (f"{each.name} {each.ready_s:.1f} s" for each in (*self.replicas, self.router))
        print(f"\nready after: {', '.join(pods_ready)}")

    def replica(self) -> Played:
        played = self.network.play(
            self._engine.pod, f"replica-{next(self._numbers)}", self._engine.image, self._engine.arguments
        )
        played.wait_ready()
        return played

    def another_router(self, name: str, *more: str) -> Played:
        router = self.network.play(
            of_a_file(of_overlay("kind", "router"), self._file), name, ROUTER, more, self._folder
        )
        router.wait_ready()
        return router

    def announce(self) -> None:
        text = "".join(f'[[replicas]]\nurl = "{each.url}"\nname = "{each.name}"\n' for each in self.replicas)
        whole = self._file.with_suffix(".new")
        whole.write_text(text)
        whole.replace(self._file)

    def known(self, router: Played | None = None) -> dict[str, Any]:
        answer = httpx2.get(f"{(router or self.router).url}/replicas", timeout=5, trust_env=False)
        return {each["name"]: each for each in answer.json()["replicas"]}

    def is_exact(self, router: Played | None = None) -> bool:
        """The router has exactly these replicas, and knows the cache of each."""
        known = self.known(router)
        return known.keys() == {each.name for each in self.replicas} and all(
            each["state"] == "exact" for each in known.values()
        )

    def wait_known(self) -> None:
        wait_until(self.is_exact, "the router knows the replicas")


def of_overlay(overlay: str, component: str) -> Pod:
    [found] = [pod for pod in pods(rendered(overlay)) if pod.is_a(component=component)]
    return found


def of_a_file(router: Pod, file: Path) -> Pod:
    """The router's pod, with its replicas in a file in place of the API server."""
    [container] = router.spec["containers"]
    assert FOUND in container["args"]
    arguments = [f"--replicas-file={file}" if word == FOUND else word for word in container["args"]]
    return router._replace(spec=router.spec | {"containers": [container | {"args": arguments}]})
