"""Real engines, and their logs of the hits that their own caches found."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import msgspec
from msgspec import Struct

from tests.chaos.replicas import free_ports
from tests.events.processes import wait_until

VARIABLE = "WARMROUTE_LIVE"  # names the folder with the environment and the model
RUNNER = Path(__file__).resolve().parent / "runner"  # what runs inside the engines
READY_S = 900.0  # of one among several, on a busy machine
IN_PROCESS = (
    "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # by its path: without a GPU its name stands for another
)
MODEL = "m"
ENGINES_ID = re.compile(  # within the scheduler's: the router's, a gateway's, or the answer's
    r"req-[0-9a-f]+-\d+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|resp_[0-9a-f]+"
)
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


def missing() -> str | None:
    """Return the reason why no engine can be started here, or None."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} is not set; it names the folder that `python -m qualification.engines.setup` made"
    for part in ("venv/bin/vllm", "model/tokenizer.json"):
        if not (Path(folder) / part).exists():
            return (
                f"{folder}, which {VARIABLE} names, has no {part}; run `python -m qualification.engines.setup {folder}`"
            )
    return None


class Found(Struct):
    """A line of an engine's log: the tokens that its scheduler found cached for a request."""

    admit: str
    hit: int
    lower: int = 0  # in other memory, beyond the hit
    prompt: list[int] = []
    salt: str | None = None
    adapter: str | None = None
    pictures: list[tuple[str, int, int]] = []  # their names and places among the tokens
    preempted: bool = False  # it had begun before

    @property
    def tokens(self) -> int:
        return self.hit + self.lower


_decode = msgspec.json.Decoder(Found).decode


class Engine:
    """A running server. `environment` is that of the runner (RUNNER_...), `options` are the engine's own."""

    kind = "vllm"
    reset_path = "/reset_prefix_cache"

    def __init__(
        self,
        log: Path,
        environment: Mapping[str, str],
        options: Sequence[str],
        *,
        block_size: int = 16,
        blocks: int = 512,
        algorithm: str = "sha256",
        events: Mapping[str, object] = {},
        ranks: int = 1,
        model: str = "model",
    ) -> None:
        self.folder = Path(os.environ[VARIABLE])
        self._model = str(self.folder / model)
        self.log = log
        self.ranks = ranks
        self.port = free_ports(1 + 2 * ranks)
        self.events_port, self.replay_port = self.port + 1, self.port + 1 + ranks
        settings = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": "",
            **events,
        }
        self._command = [str(self.folder / "venv/bin/python"), *self._program(block_size, blocks, algorithm, settings)]
        if ranks > 1:
            self._command += ["--data-parallel-size", str(ranks), "--api-server-count", "1"]
        self._command += options
        self._environment = {
            **os.environ,
            **QUIET,
            "PYTHONPATH": str(RUNNER),
            "RUNNER_LOG": str(log),
            **environment,
        }
        self.process = self._start()

    def _program(self, block_size: int, blocks: int, algorithm: str, settings: Mapping[str, object]) -> list[str]:
        return [
            *(str(self.folder / "venv/bin/vllm"), "serve", self._model, "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self.port), "--worker-cls", "worker.Worker"),
            *("--distributed-executor-backend", IN_PROCESS),
            *("--block-size", str(block_size), "--num-gpu-blocks-override", str(blocks), "--max-model-len", "4096"),
            *("--max-num-seqs", "16", "--max-num-batched-tokens", "2048", "--enforce-eager", "--enable-prefix-caching"),
            *("--enable-prompt-tokens-details", "--enable-request-id-headers", "--prefix-caching-hash-algo", algorithm),
            *("--kv-events-config", json.dumps(settings)),
        ]

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.with_suffix(".out").open("ab") as out:
            return subprocess.Popen(
                self._command, env=self._environment, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.events_port}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    def wait_ready(self) -> None:
        wait_until(self._is_ready, f"{self.kind} is ready", within_s=READY_S)

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            said = self.log.with_suffix(".out").read_text()[-3000:]
            raise RuntimeError(f"{self.kind} has ended with status {self.process.returncode}: {said}")
        try:
            with urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (HTTPException, OSError):  # the first: somebody else was given the port
            return False

    def restart(self) -> None:
        """Start it again, at the same ports and with an empty cache."""
        self.end()
        self.process = self._start()
        self.wait_ready()

    def end(self) -> None:
        """Kill it with all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def found(self) -> dict[str, Found]:
        """The findings of the scheduler, by the part of its ids that others know: the router's id, or the answer's."""
        found: dict[str, Found] = {}
        for one in self.all_found():
            if (name := ENGINES_ID.search(one.admit)) is not None:
                found.setdefault(name[0], one)  # later ones are of other choices, or after a preemption
        return found

    def all_found(self) -> list[Found]:
        """All findings: while a request waits for room, it is looked up again and again."""
        with self.log.open("rb") as lines:
            return [_decode(text) for text in lines if text.endswith(b"\n")]


class SGLang(Engine):
    """SGLang's radix cache and publisher, behind a server of ours."""

    kind = "sglang"
    reset_path = "/flush_cache"

    def _program(self, block_size: int, blocks: int, algorithm: str, settings: Mapping[str, object]) -> list[str]:  # noqa: ARG002
        published = {
            name: value for name, value in settings.items() if name not in ("enable_kv_cache_events", "publisher")
        }
        numbers = map(str, (self.port, block_size, blocks * block_size))
        worker = str(RUNNER / "sglang_worker.py")
        return [worker, self._model, str(self.log), *numbers, json.dumps(published)]


@contextmanager
def ready(running: Engine) -> Iterator[Engine]:
    """Wait for an engine, and end it."""
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()
