"""Measure what a request costs in routers of several makes, asked by wrk: CPU, requests per second, 99th percentile.

Ours in approximate and in exact mode, and the others of which an environment is named: WARMROUTE_SGLANG_ROUTER and
WARMROUTE_VLLM_ROUTER as in `peers`, WARMROUTE_DYNAMO with ai-dynamo 1.6.1 (`pip install --no-deps` of it and its
runtime, and what it imports: its own requirements want a GPU). Two workers that answer at once stand before all, but
for Dynamo, whose workers are its own mocker. On "1 core" the router has the first to itself, and wrk and workers the
second; on "2 cores" all share both, ours with two workers. Linux only: it reads /proc.
"""

import os
import random
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.api.chat_templates import TEMPLATES
from tests.api.tokenizers import saved
from tests.bench.measure import heading, row
from tests.bench.peers import PEERS, Peer, tree_cpu_s
from tests.bench.router import (
    APPROXIMATE,
    EXACT,
    MODEL,
    SMALL,
    STREAMED,
    Mode,
    Ports,
    Workload,
    options,
    source_words,
    workers,
)
from tests.bench.tokens import trained
from tests.chaos.replicas import free_ports
from tests.chaos.routers import router
from tests.events.processes import DEADLINE_S, wait_until
from tests.processes import family
from tests.replica.serving import Replica

WORKLOADS = SMALL._replace(requests=20_000), STREAMED._replace(requests=3000)  # then they begin anew
CLIENTS = 1, 32
WARM_S, FOR_S = 1, 4
DYNAMO = "WARMROUTE_DYNAMO"
SCRIPT = """
local bodies, asked, headers = {}, 0, {["Content-Type"] = "application/json"}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
request = function()
  asked = asked + 1
  return wrk.format("POST", "/v1/chat/completions", headers, bodies[(asked - 1) %% #bodies + 1])
end
"""


class Figures(NamedTuple):
    cpu_ms: float  # per 1,000 requests
    per_s: float
    p99_ms: float


class Case(NamedTuple):
    workload: str
    clients: int
    cores: int


class Make(NamedTuple):
    name: str
    started: Callable[[int], AbstractContextManager[Replica]]  # with so many cores


class Dynamo(Replica):
    """Dynamo's frontend, and its mocker, which is not counted."""

    def __init__(self, home: str, model: Path, folder: Path) -> None:
        self._given_port = free_ports(1)
        self._python = f"{home}/bin/python"
        environment = {"DYN_FILE_KV": str(folder), "DYN_LOG": "error"}
        where = ("--http-host", "127.0.0.1", "--http-port", str(self._given_port))
        self._start(
            [self._python, "-m", "dynamo.frontend", "--router-mode", "kv", "--discovery-backend", "file", *where],
            **environment,
        )
        command = [self._python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL]
        command += ["--discovery-backend", "file", "--speedup-ratio", "1000000", "--block-size", "16"]
        command += ["--num-workers", "2", "--max-model-len", "100000", "--num-gpu-blocks-override", "50000"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.mocker = subprocess.Popen(command, env=os.environ | environment, **silent)  # type: ignore[call-overload]

    @property
    def port(self) -> int:
        return self._given_port

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.err
        with suppress(OSError):
            return MODEL in self.get("/v1/models").body.decode()
        return False


def run(rounds: int) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-fronts-")))
        words = source_words()
        model = model_in(folder, words)
        scripts = {workload: written(workload, words, folder) for workload in WORKLOADS}
        ports = stack.enter_context(workers(model))
        makes = [*ours(ports, model), *others(ports), *dynamo(model, folder)]
        measured: dict[Case, dict[str, list[Figures]]] = {}
        for cores in (1, 2):
            for number in range(rounds):
                for make in makes if number % 2 else reversed(makes):
                    for case, figures in one_run(make, cores, scripts):
                        measured.setdefault(case, {}).setdefault(make.name, []).append(figures)
        for case, by_make in measured.items():
            show(case, by_make)


def one_run(make: Make, cores: int, scripts: Mapping[Workload, Path]) -> Iterator[tuple[Case, Figures]]:
    own, others_own = ({0}, {1}) if cores == 1 else ({0, 1}, {0, 1})
    with make.started(cores) as running:
        pin(running.process.pid, own)
        for workload, script in scripts.items():
            asked(running, script, CLIENTS[-1], others_own, WARM_S)
            for clients in CLIENTS:
                yield Case(workload.name, clients, cores), asked(running, script, clients, others_own, FOR_S)


def show(case: Case, by_make: Mapping[str, Sequence[Figures]]) -> None:
    heading(f"{case.workload}, {case.clients} connections, {case.cores} core{'s' * (case.cores > 1)}")
    for name, figures in by_make.items():
        row(f"{name}: CPU per 1,000 requests", [one.cpu_ms for one in figures], "ms")
        row(f"{name}: requests", [one.per_s for one in figures], "/s")
        row(f"{name}: 99th percentile", [one.p99_ms for one in figures], "ms")
    print()


# ---- the makes


def ours(ports: Sequence[Ports], model: Path) -> Iterator[Make]:
    def started(mode: Mode, cores: int) -> AbstractContextManager[Replica]:
        return router("--workers", cores, "--log-level", "error", *options(mode, ports, model))

    for mode in (APPROXIMATE, EXACT):
        yield Make(f"warmroute, {mode.name}", partial(started, mode))


def others(ports: Sequence[Ports]) -> Iterator[Make]:
    urls = [f"http://127.0.0.1:{one.http}" for one in ports]

    def started(peer: Peer, cores: int) -> AbstractContextManager[Replica]:  # noqa: ARG001
        return peer.started(urls)

    for peer in PEERS:
        if (why := peer.absent()) is not None:
            print(f"{peer.name}: {why}")
        else:
            yield Make(f"{peer.package} {peer.version()}", partial(started, peer))


def dynamo(model: Path, folder: Path) -> Iterator[Make]:
    @contextmanager
    def started(cores: int) -> Iterator[Replica]:
        del cores
        with tempfile.TemporaryDirectory(dir=folder) as discovery:
            running = Dynamo(home, model, Path(discovery))
            try:
                wait_until(running.is_ready, "Dynamo is ready", 4 * DEADLINE_S)
                pin(running.mocker.pid, {1})
                yield running
            finally:
                for pid in family(running.mocker.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, 9)
                running.mocker.wait()
                running.process.kill()
                running.end(None)

    home = os.environ.get(DYNAMO, "")
    if not home:
        print(f"Dynamo: not run: {DYNAMO} names no environment that has ai-dynamo")
    else:
        yield Make("Dynamo's frontend", started)


# ---- one run


def model_in(folder: Path, words: Sequence[str]) -> Path:
    """A folder with a tokenizer and what Dynamo reads beside it."""
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 32_768,
        "max_position_embeddings": 131_072,
        "eos_token_id": 0,
    }
    tokenizer_config = {"chat_template": TEMPLATES["qwen"], "eos_token": "<|im_end|>"}
    return saved(trained(words), folder, config=config, tokenizer_config=tokenizer_config)


def written(workload: Workload, words: Sequence[str], folder: Path) -> Path:
    """A script for wrk that asks these requests one after the other."""
    made = workload.bodies(words, random.Random(workload.title), workload.requests)
    bodies, script = folder / f"{workload.turns}.bodies", folder / f"{workload.turns}.lua"
    bodies.write_bytes(b"".join(body.partition(b"\r\n\r\n")[2] + b"\n" for body in made))
    script.write_text(SCRIPT % bodies)
    return script


def asked(running: Replica, script: Path, clients: int, cores: set[int], seconds: int) -> Figures:
    before_s = tree_cpu_s(running.process.pid)
    command = ["taskset", "-c", ",".join(map(str, cores)), "wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "--latency"]
    url = f"http://127.0.0.1:{running.port}"
    said = subprocess.run([*command, "-s", str(script), url], capture_output=True, text=True, check=True).stdout
    assert "Non-2xx" not in said and "Socket errors" not in said, said
    [requests], [per_s] = re.findall(r"(\d+) requests in", said), re.findall(r"Requests/sec: +([\d.]+)", said)
    cpu_ms = 1e6 * (tree_cpu_s(running.process.pid) - before_s) / int(requests)
    [(p99, unit)] = re.findall(r"99% +([\d.]+)(us|ms|s)", said)
    return Figures(cpu_ms, float(per_s), float(p99) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit])


def pin(pid: int, cores: set[int]) -> None:
    for one in family(pid):
        for thread in Path(f"/proc/{one}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
