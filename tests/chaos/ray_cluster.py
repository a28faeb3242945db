"""A Ray with a head and workers on machines of their own, a fleet on the workers, and a router beside them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import msgspec

from fleet.on_ray.orders import Launched, Order, Trouble, decode_answer
from fleet.plan import FleetPlan, ModelPlan, Resources
from tests.chaos.nodes import Node, network
from tests.chaos.ray_starts import RayStart
from tests.events.processes import wait_until
from tests.replica.serving import MODEL

WORKERS = 3
PER_WORKER = 2
REPLICAS = 4
KEY = "key-of-the-fleet"
RAY = str(Path(sys.executable).with_name("ray"))
GCS_PORT, REDIS_PORT, CONTROLLER_PORT = 6379, 6380, 7000
TUNED = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # nodes outlive their head
}
SECRET = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-that-all-nodes-of-the-test-have"}
SMALL = ("--num-cpus", "100", "--object-store-memory", "78643200", "--disable-usage-stats", "--block")
PACE = (
    *("--set=simulated_prefill_tokens_per_s=200000", "--set=simulated_decode_tokens_per_s=30"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0"),
)
PLAN = FleetPlan(
    models=(
        ModelPlan(
            name=MODEL,
            model=MODEL,
            engine="simulated",
            replicas=REPLICAS,
            resources=Resources(custom={"room": 1.0}),
            options=PACE,
        ),
    )
)


def fleet_toml(replicas: int) -> str:
    """The plan above with another number of replicas."""
    [model] = PLAN.models
    return "\n".join(
        [
            *("[[models]]", f"name = '{MODEL}'", f"model = '{MODEL}'", "engine = 'simulated'"),
            *(f"replicas = {replicas}", "resources = {custom = {room = 1}}", f"options = {list(model.options)}"),
        ]
    )


class Cluster:
    def __init__(self, nodes: list[Node], folder: Path) -> None:
        self.head, self.store, self.front, *self.workers = nodes
        self._folder = folder
        self._starts = 0
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._environment |= TUNED | SECRET | {"RAY_USAGE_STATS_ENABLED": "0"}
        self.url = f"http://{self.head.address}:{CONTROLLER_PORT}"
        self.gcs = f"{self.head.address}:{GCS_PORT}"
        self._http: httpx2.Client

    # ---- its nodes

    def start_store(self) -> None:
        """Choose the store of Ray's head that survives restarts: Redis, or RocksDB on the head's disk."""
        if (redis := shutil.which("redis-server")) is None:
            self._environment |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._folder / "gcs")}
            return
        options = ("--port", str(REDIS_PORT), "--bind", self.store.address, "--protected-mode", "no", "--save", "")
        log = self._folder / "redis.log"
        self.store.start([redis, *options, "--dir", str(self._folder)], log)
        wait_until(lambda: "eady to accept connections" in log.read_text(), "Redis is ready")
        self._environment |= {"RAY_REDIS_ADDRESS": f"{self.store.address}:{REDIS_PORT}"}

    def start_head(self) -> RayStart:
        folder = self._folder / "head"
        (folder / "ray_current_cluster").unlink(missing_ok=True)  # else Ray takes the one that died for running
        return self._start(self.head, folder, "--head", "--port", str(GCS_PORT), "--include-dashboard", "false")

    def start_worker(self, node: Node) -> RayStart:
        room = json.dumps({"room": PER_WORKER})
        return self._start(node, self._folder / node.address, "--address", self.gcs, "--resources", room)

    def _start(self, node: Node, folder: Path, *options: str) -> RayStart:
        self._starts += 1
        log = self._folder / f"start-{self._starts}.log"
        own = ("--node-ip-address", node.address, "--temp-dir", str(folder), *SMALL)
        return RayStart(node, [RAY, "start", *options, *own], log, self._environment)

    # ---- its fleet

    def launch(self, environment: Mapping[str, str] = MappingProxyType({}), **order: Any) -> Launched | Trouble:
        given = msgspec.json.encode(
            Order(**{"plan": PLAN, "address": self.gcs, "port": CONTROLLER_PORT, "key": KEY, **order})
        )
        command = [sys.executable, "-m", "fleet.on_ray.launch"]
        done = self.head.run(command, given + b"\n", env={**self._environment, **environment})
        assert done.stdout, done.stderr.decode()
        return decode_answer.decode(done.stdout)

    def command(self, node: Node, *words: str) -> "subprocess.CompletedProcess[bytes]":
        """Run a command of ours on that node, about this fleet."""
        return node.run([sys.executable, "-m", "fleet", *words], env=self._for_commands)

    def start_command(self, log: Path, *words: str) -> "subprocess.Popen[Any]":
        """Start a command of ours that keeps running, on the head."""
        return self.head.start([sys.executable, "-m", "fleet", *words], log, env=self._for_commands)

    @property
    def _for_commands(self) -> dict[str, str]:
        return self._environment | {"WARMROUTE_FLEET": self.url, "WARMROUTE_FLEET_KEY": KEY}

    def open(self) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        self._http = httpx2.Client(base_url=self.url, timeout=5, trust_env=False, headers=headers)

    def close(self) -> None:
        self._http.close()

    def fleet(self) -> Any:
        return self._http.get("/fleet").raise_for_status().json()

    def scale(self, replicas: int) -> None:
        self._http.post("/models/scale", json={"model": MODEL, "replicas": replicas}).raise_for_status()

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.fleet()["replicas"]}

    def pids(self) -> dict[str, int]:
        return {name: each.get("pid", 0) for name, each in self.replicas().items()}

    def wait_ready(self, count: int = REPLICAS, not_of: tuple[int, ...] = (), not_on: str = "") -> float:
        """Wait for this many ready replicas, without these processes and that node; return the seconds."""
        began_s = time.monotonic()

        def ready() -> bool:
            with suppress(httpx2.HTTPError):
                found = self.replicas().values()
                return len(found) == count and all(
                    each["life"] == "ready" and each["pid"] not in not_of and each["node"] != not_on for each in found
                )
            return False

        wait_until(ready, f"{count} replicas are ready")
        return time.monotonic() - began_s

    def worker_with_replicas(self) -> tuple[Node, list[int]]:
        """The one with the most, and their processes."""
        on: dict[str, list[int]] = {node.address: [] for node in self.workers}
        for replica in self.replicas().values():
            on[replica["node"]].append(replica["pid"])
        address = max(on, key=lambda each: len(on[each]))
        return next(node for node in self.workers if node.address == address), on[address]


def raylet(node: Node) -> int:
    return next(pid for pid, line in node.processes().items() if "raylet/raylet " in line)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """This process is on the machine of the router meanwhile."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="n-"))  # short: the path of a socket goes below it
    try:
        with network(3 + WORKERS) as nodes:
            made = Cluster(nodes, folder)
            made.start_store()
            made.start_head().wait()
            for start in [made.start_worker(worker) for worker in made.workers]:
                start.wait()
            with made.front.inside():
                made.open()
                try:
                    yield made
                finally:
                    made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
