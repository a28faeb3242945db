"""Commands that start a replica of each engine. Imports no engine: others need not be installed here.

The flags of vLLM and SGLang are compared with their own parsers by tests/fleet/test_engine_flags.py.
"""

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from fleet.host.child import module
from fleet.host.report import ReplicaAddress
from fleet.plan import FOREIGN, ModelPlan, Task

OUR_KEY = "WARMROUTE_API_KEY"
# SGLang takes its key as an option alone, and everybody on a machine can read a command line: it is added inside.
SGLANG_KEY = "WARMROUTE_SGLANG_API_KEY"
SGLANG_MODULE = f"""import os, runpy, sys
key = os.environ.pop({SGLANG_KEY!r}, None)
sys.argv[1:] += [] if key is None else ["--api-key", key]
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)"""


class Launch(Struct, frozen=True):
    command: tuple[str, ...]
    environment: dict[str, str]  # beside what is inherited
    place: ReplicaAddress | None  # None: our ready line says it


def launch(task: Task, host: str, incarnation: str) -> Launch:
    """Build the command; `host` is the node's address. Raise OSError if `engine_missing` finds no engine."""
    if task.plan.engine == "vllm":
        return _vllm(task, host, incarnation)
    if task.plan.engine == "sglang":
        return _sglang(task, host, incarnation)
    return Launch(_ours(task, host), _environment(task.plan, OUR_KEY), None)


def engine_missing(plan: ModelPlan, host: str = "127.0.0.1") -> str | None:
    """Say why this node cannot start the engine, and what to do; None if it can."""
    if plan.engine not in FOREIGN:
        return None
    if ":" in host:
        return (
            f"{plan.engine} would listen on {host}, but it publishes its events only over IPv4; "
            "give the node an IPv4 address"
        )
    if plan.engine == "vllm" and _program("vllm", plan) is None:
        return "this node has no program vllm; install vLLM, or name its folder in environment = {PATH = '...'}"
    # We cannot inspect another interpreter before starting it.
    python = _python(plan) if "PATH" in plan.environment else find_spec("sglang")
    if plan.engine == "sglang" and python is None:
        return (
            "this node has no Python with sglang; install SGLang, or name the folder of the Python that has it "
            "in environment = {PATH = '...'}"
        )
    return None


# ---- ours


def _ours(task: Task, host: str) -> tuple[str, ...]:
    """The plan's options come before ours, so that ours count; only of the device it may have its own mind."""
    plan = task.plan
    device = ("--device", "cuda" if plan.resources.gpus else "cpu")
    what = ["--model", plan.model, "--served-model-name", plan.served_name, "--engine", plan.engine]
    where = ["--host", host, "--port", "0", "--events-host", host, "--events-port", "0", "--replica-name", task.name]
    where += ["--kv-host", host, "--kv-port", "0"]
    life = ["--set=die_with_parent=true", "--drain-timeout", f"{plan.drain_timeout_s:g}"]
    files = _given({"--tokenizer": plan.tokenizer, "--chat-template": plan.chat_template, "--role": plan.role})
    ranks = ["--tensor-parallel-size", str(plan.tensor_parallel)] if plan.tensor_parallel > 1 else []
    return tuple(module("fleet", "replica", *device, *plan.options, *what, *where, *life, *files, *ranks))


# ---- other engines


class _Ports(Struct, frozen=True):
    """Free ports; if another process takes one, the engine ends, and starts again with others."""

    http: int
    events: int
    replay: int


def _free_ports(host: str) -> _Ports:
    with ExitStack() as held:  # together, so that they are different ones
        sockets = [held.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind((host, 0))
        return _Ports(*(each.getsockname()[1] for each in sockets))


def _vllm(task: Task, host: str, incarnation: str) -> Launch:
    plan, ports = task.plan, _free_ports(host)
    command = (
        *(_program("vllm", plan) or "vllm", "serve", plan.model, *plan.options),
        *("--served-model-name", plan.served_name, "--host", host, "--port", str(ports.http)),
        *("--tensor-parallel-size", str(plan.tensor_parallel), "--enable-prefix-caching"),
        "--enable-prompt-tokens-details",  # so that answers say what the cache had of the prompt
        *("--kv-events-config", json.dumps({"enable_kv_cache_events": True, **_events(task, host, ports)})),
        *_given({"--tokenizer": plan.tokenizer, "--chat-template": plan.chat_template}),
    )
    return Launch(command, _environment(plan, "VLLM_API_KEY"), _place(task, host, ports, incarnation))


def _sglang(task: Task, host: str, incarnation: str) -> Launch:
    plan, ports = task.plan, _free_ports(host)
    command = (
        *(_python(plan) or "python", "-c", SGLANG_MODULE, "--model-path", plan.model, *plan.options),
        *("--served-model-name", plan.served_name, "--host", host, "--port", str(ports.http)),
        *("--tp-size", str(plan.tensor_parallel), "--enable-metrics", "--enable-cache-report"),
        *("--kv-events-config", json.dumps(_events(task, host, ports))),
        *_given({"--tokenizer-path": plan.tokenizer, "--chat-template": plan.chat_template}),
    )
    return Launch(command, _environment(plan, SGLANG_KEY), _place(task, host, ports, incarnation))


def _events(task: Task, host: str, ports: _Ports) -> dict[str, str]:
    """Their publisher binds only where it sees `*` or `::`, and connects otherwise.

    `*` would be every address of the node; an IPv4 address written as one of IPv6 is that address and no other.
    """
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://[::ffff:{socket.gethostbyname(host)}]:{ports.events}",
        "replay_endpoint": f"tcp://{host}:{ports.replay}",
        "topic": f"kv@{task.name}@{task.plan.served_name}",
    }


def _place(task: Task, host: str, ports: _Ports, incarnation: str) -> ReplicaAddress:
    assert task.plan.engine in ("vllm", "sglang")
    return ReplicaAddress(
        url=f"http://{host}:{ports.http}",
        model=task.plan.served_name,
        engine=task.plan.engine,
        events=f"tcp://{host}:{ports.events}",
        replay=f"tcp://{host}:{ports.replay}",
        incarnation=incarnation,
    )


def _given(flags: Mapping[str, str | None]) -> list[str]:
    return [word for flag, value in flags.items() if value is not None for word in (flag, value)]


def _key(plan: ModelPlan) -> str | None:
    """The key that its replicas shall demand."""
    name = plan.api_key_env
    return None if name is None else plan.environment.get(name) or os.environ.get(name)


def _environment(plan: ModelPlan, key_variable: str) -> dict[str, str]:
    """Return the variables to add. Other engines must not import our packages from the current folder."""
    safe = {"PYTHONSAFEPATH": "1"} if plan.engine in FOREIGN else {}
    key = _key(plan)
    return safe | plan.environment | ({key_variable: key} if key is not None else {})


def _program(name: str, plan: ModelPlan) -> str | None:
    """Find a program in the plan's PATH, else in this process's, else beside its Python."""
    if "PATH" in plan.environment:
        return shutil.which(name, path=plan.environment["PATH"])
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _python(plan: ModelPlan) -> str | None:
    if "PATH" not in plan.environment:
        return sys.executable
    return _program("python", plan) or _program("python3", plan)
