"""Replicas as pods: what routers may know of them from an API server that has faults of its own, and a kubelet."""

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from router.config import Kubernetes
from router.members.discovery.collection import Cluster
from router.members.spec import ReplicaSpec, parse_replicas, parse_target
from tests.router.kubernetes_api import PODS, SPACE, KubernetesApi, pod
from tests.world.edited import LOOKS_S, EditedFile, Tables
from tests.world.network import Network
from tests.world.replica import PORT, ScriptedReplica

API_PORT = 6443
LOOKS_AFTER_S = 0.25  # the kubelet at its pods
HEALS_S = 9.0  # after a trouble: the longest pause between two lists, what Retry-After adds, and slow connections
EVERY_S = 8.0
LASTS_S = (0.0, 0.3, 2.0, 6.0)
SILENT_S = 10.0  # until a connection is found dead that lost its way
STEPS: tuple[tuple[Any, ...], ...] = (
    *(("stop",), ("drop",), ("forget",), ("mark",), ("fail", 410), ("fail", 500), ("babble", b"<p>No.</p>\n")),
    *(("cut", 0.4, "ends"), ("cut", 0.9, "drops"), ("repeat", 2, True)),
    *(("refuse", kind, status) for kind in ("list", "page", "watch") for status in (401, 403, 410, 500)),
    ("refuse", "list", 429, {"retry_after": "1"}),
)


class ClusterOfPods(EditedFile[ReplicaSpec]):
    """Takes the place of a file of replicas: an operator changes pods as he would change its tables."""

    def __init__(
        self, folder: Path, tables: Tables, network: Network, replicas: Sequence[ScriptedReplica], seed: int
    ) -> None:
        self.host, self._replicas, self._seed = network.host("api"), replicas, seed
        self.api = KubernetesApi(self.host.address, API_PORT)
        self.api.page = 2
        self._pods: dict[str, Any] = {}
        self._uid: dict[str, str] = {}
        self._seen: dict[str, tuple[bool, int]] = {one.name: (True, 1) for one in replicas}  # runs, and which process
        self.troubles: list[list[float]] = []  # from when to when routers may hear nothing
        super().__init__(folder, "[replicas]", tables, parse_replicas, network.loop)

    @property
    def config(self) -> Kubernetes:
        return Kubernetes(Cluster(self.api.url, SPACE), pods="app=llm")

    def write(self, tables: Tables) -> None:
        self._wanted = tables
        self._store()

    def break_(self, text: str) -> None:
        """Lose all watches: there is no file."""
        del text
        self.api.drop()

    def mend(self) -> None:
        """Nothing is ever half written."""

    def _store(self) -> None:
        """Put the pods as they are by now, one after the other, and note what a router makes of each change."""
        for name in sorted(self._pods.keys() | self._wanted.keys()):
            if (fields := self._wanted.get(name)) is None:
                self.api.delete(PODS, name)
                del self._pods[name]
                self._note(name, None)
                continue
            if name not in self._pods:
                self._uid[name] = f"uid-{self.api.version}"
            runs, process = self._seen[name]
            told = {
                of: json.dumps(fields[of]).strip('"') for of in ("engine", "max_model_len", "resume") if of in fields
            }
            annotations = {f"warmroute/{of.replace('_', '-')}": value for of, value in told.items()}
            more: dict[str, Any] = {
                "ready": runs,
                "restarts": process,
                "ending": "draining" in fields,
                "uid": self._uid[name],
            }
            content = pod(name, parse_target(fields["url"]).host, annotations=annotations, **more)
            if content != self._pods.get(name):
                self._pods[name] = content
                self.api.put(PODS, content)
                incarnation = f"{more['uid']}/containerd://{name}-{process}"
                self._note(name, ReplicaSpec(**fields, incarnation=incarnation) if runs or more["ending"] else None)

    def _note(self, name: str, spec: ReplicaSpec | None) -> None:
        others = {one: known for one, known in (self.versions or [{}])[-1].items() if one != name}
        self._versions.append((self.loop.time(), others if spec is None else {**others, name: spec}))

    # ---- what routers may know

    def in_force(self, from_s: float, to_s: float) -> list[Mapping[str, ReplicaSpec]]:
        found, replaced_s = list[Mapping[str, ReplicaSpec]](), math.inf
        for written_s, named in reversed(self._versions):
            if named is not None and written_s <= to_s and self._known_s(replaced_s) >= from_s:
                found.append(named)
            replaced_s = written_s
        return found

    def _known_s(self, at_s: float) -> float:
        """When each router has heard of what has changed at this time."""
        known_s = at_s + LOOKS_S
        for began_s, ended_s in self.troubles:
            if began_s <= known_s and ended_s + HEALS_S >= at_s:
                known_s = max(known_s, ended_s + HEALS_S)
        return known_s

    # ---- what happens by itself

    async def look_after(self) -> None:
        """Say of each pod whether its replica runs, like a kubelet."""
        while True:
            await asyncio.sleep(LOOKS_AFTER_S)
            for one in self._replicas:
                self._seen[one.name] = PORT in one.host.listeners, one.incarnation
            self._store()

    async def trouble(self, until_s: float, say: Callable[[str, str], None]) -> None:
        """One time of troubles after the other, until a while before the end."""
        chance = random.Random(f"{self._seed} api")
        while (at_s := self.loop.time() + chance.expovariate(1 / EVERY_S)) < until_s - HEALS_S - SILENT_S:
            await asyncio.sleep(at_s - self.loop.time())
            self.troubles.append([at_s, math.inf])
            for step in chance.sample(STEPS, chance.randrange(1, 4)):
                say("api", f"suffers {step}")
                await self.api.suffer(*step)
            if silent := chance.random() < 0.2:
                self.host.silence()
            await asyncio.sleep(chance.choice(LASTS_S))
            if silent:
                self.host.lose(chance, chance.choice((0.0, 1.0)))
                self.host.speak()
                await asyncio.sleep(SILENT_S)
            await self.api.suffer("heal")
            self.troubles[-1][1] = self.loop.time()
            say("api", "is well")
