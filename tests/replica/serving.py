"""Real replicas for tests: processes of their own on free ports of loopback, spoken to over HTTP."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any, NamedTuple, TypeVar

import msgspec

from replica.config import EngineConfig, ReplicaConfig, SimulatedConfig
from tests.events.processes import DEADLINE_S, wait_until
from tests.processes import children, of_process

MODEL = "demo"
KEY = "secret"
FAST = SimulatedConfig(prefill_tokens_per_s=1e6, decode_tokens_per_s=2000, step_overhead_s=0.0)
SLOW = SimulatedConfig(prefill_tokens_per_s=1e6, decode_tokens_per_s=20, step_overhead_s=0.0, mean_output_tokens=0)
EOS = (257, 259)  # of the tokenizer that takes bytes

SERVE = "import sys, msgspec; from replica.config import ReplicaConfig; from replica.server import serve; \
sys.exit(serve(msgspec.json.decode(sys.argv[1], type=ReplicaConfig)))"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


class Replica:
    """A running HTTP process and its engine."""

    host = "127.0.0.1"

    def __init__(self, config: ReplicaConfig, **environment: str) -> None:
        self._start([sys.executable, "-c", SERVE, msgspec.json.encode(config).decode()], **environment)

    def _start(self, command: Sequence[str], **environment: str) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
        )
        self.out: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.out.put)),
            threading.Thread(target=self._read, args=(self.process.stderr, self.err.append)),
        ]
        for reader in self._readers:
            reader.start()
        self.ready_line = ""

    @staticmethod
    def _read(stream: Any, take: Callable[[str], object]) -> None:
        for line in stream:
            take(line)

    def wait_ready(self, within_s: float = DEADLINE_S) -> None:
        def said() -> bool:
            assert self.process.poll() is None, self.err
            if not self.out.empty():
                self.ready_line = self.out.get()
            return bool(self.ready_line)

        wait_until(said, "the replica is ready", within_s)

    @property
    def port(self) -> int:
        return int(self.ready_line.split(",")[0].rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def engine_pid(self) -> int:
        [engine] = [pid for pid in children(self.process.pid) if b"replica.process" in of_process(pid, "cmdline")]
        return engine  # another one tries constraints

    def open(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection(self.host, self.port, timeout=DEADLINE_S)
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            connection.request(method, path, raw, headers or {})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection, response = self.open(method, path, body, headers)
        try:
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.ask("POST", path, body, headers)

    def load(self) -> Any:
        return self.ask("GET", "/load", headers={"Authorization": f"Bearer {KEY}"}).json

    def wait_idle(self) -> None:
        """Until the engine holds no request and no block."""

        def idle() -> bool:
            load = self.load()
            busy = load["load"]["running"] + load["load"]["waiting"] + load["pool"]["referenced"]
            return not busy and not load["open_requests"]

        wait_until(idle, "every request has given its blocks back")

    def end(self, number: int | None = signal.SIGTERM) -> int:
        """Sends the signal, or waits for the natural end; returns the exit status."""
        if number is not None and self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return status


def config(simulated: SimulatedConfig = FAST, http: dict[str, Any] | None = None, **engine: Any) -> ReplicaConfig:
    fields: dict[str, Any] = {"model": MODEL, "engine": "simulated", "eos_token_ids": EOS, "log_level": "warning"}
    return ReplicaConfig(engine=EngineConfig(**(fields | engine), simulated=simulated), **({"port": 0} | (http or {})))


R = TypeVar("R", bound=Replica)


def replica(
    simulated: SimulatedConfig = FAST, http: dict[str, Any] | None = None, **engine: Any
) -> AbstractContextManager[Replica]:
    return running(Replica(config(simulated, http, **engine)))


@contextmanager
def running(started: R) -> Iterator[R]:
    try:
        started.wait_ready()
        yield started
    finally:
        started.process.kill()
        started.end(None)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
