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

from api.process.lifeline import module
from engines import SERVERS
from engines.profile import ServerCommand
from fleet.host.report import ReplicaAddress
from fleet.plan import FOREIGN, ModelPlan, Task

OUR_KEY = "WARMROUTE_API_KEY"


class Launch(Struct, frozen=True):
    command: tuple[str, ...]
    environment: dict[str, str]  # beside the inherited ones
    place: ReplicaAddress | None  # None: our ready line says it


def launch(task: Task, host: str, incarnation: str) -> Launch:
    """Build the command; `host` is the node's address. Raise OSError if `engine_missing` finds no engine."""
    if (server := SERVERS.get(task.plan.engine)) is not None:
        return _foreign(server, task, host, incarnation)
    # The plan's options come before ours, so that ours count; only of the device it may have its own mind.
    plan = task.plan
    device = ("--device", "cuda" if plan.resources.gpus else "cpu")
    what = ["--model", plan.model, "--served-model-name", plan.served_name, "--engine", plan.engine]
    where = ["--host", host, "--port", "0", "--events-host", host, "--events-port", "0", "--replica-name", task.name]
    where += ["--kv-host", host, "--kv-port", "0"]
    if task.warm_from:
        where.append(f"--set=warm_from={','.join(task.warm_from)}")
    life = ["--set=die_with_parent=true", "--drain-timeout", f"{plan.drain_timeout_s:g}"]
    files = _given({"--tokenizer": plan.tokenizer, "--chat-template": plan.chat_template, "--role": plan.role})
    command = module("fleet", "replica", *device, *plan.options, *what, *where, *life, *files)
    return Launch(tuple(command), _environment(plan, OUR_KEY), None)


def engine_missing(plan: ModelPlan, host: str = "127.0.0.1") -> str | None:
    """Say why this node cannot start the engine, and what to do; None if it can."""
    server = SERVERS.get(plan.engine)
    if server is None:
        return None
    if ":" in host:
        return (
            f"{plan.engine} would listen on {host}, but it publishes its events only over IPv4; "
            "give the node an IPv4 address"
        )
    if not server.is_module:
        found: object = _program(server.program, plan)
    else:  # we cannot inspect another interpreter before starting it
        found = _python(plan) if "PATH" in plan.environment else find_spec(server.program)
    return server.missing if found is None else None


# ---- ours


# ---- other engines


def _foreign(server: ServerCommand, task: Task, host: str, incarnation: str) -> Launch:
    plan = task.plan
    with ExitStack() as held:  # together, so that they are different ones; if one is taken, the engine starts again
        sockets = [held.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind((host, 0))
        http, events, replay = (each.getsockname()[1] for each in sockets)
    publisher = {
        **server.events,
        "publisher": "zmq",
        # Their publisher binds only where it sees `*` or `::`, and connects otherwise. `*` would be every address of
        # the node; an IPv4 address written as one of IPv6 is that address and no other.
        "endpoint": f"tcp://[::ffff:{socket.gethostbyname(host)}]:{events}",
        "replay_endpoint": f"tcp://{host}:{replay}",
        "topic": f"kv@{task.name}@{plan.served_name}",
    }
    program = _python(plan) or "python" if server.is_module else _program(server.program, plan) or server.program
    command = (
        *(program, *server.start, plan.model, *plan.options),
        *("--served-model-name", plan.served_name, "--host", host, "--port", str(http)),
        *(server.ranks, str(plan.tensor_parallel), *server.switches),
        *("--kv-events-config", json.dumps(publisher)),
        *_given({server.tokenizer: plan.tokenizer, "--chat-template": plan.chat_template}),
    )
    place = ReplicaAddress(
        url=f"http://{host}:{http}",
        model=plan.served_name,
        engine=plan.engine,
        events=f"tcp://{host}:{events}",
        replay=f"tcp://{host}:{replay}",
        incarnation=incarnation,
    )
    return Launch(command, _environment(plan, server.key_variable), place)


def _given(flags: Mapping[str, str | None]) -> list[str]:
    return [word for flag, value in flags.items() if value is not None for word in (flag, value)]


def _environment(plan: ModelPlan, key_variable: str) -> dict[str, str]:
    """Return the variables to add. Other engines must not import our packages from the current folder."""
    safe = {"PYTHONSAFEPATH": "1"} if plan.engine in FOREIGN else {}
    name = plan.api_key_env  # the variable with the key that its replicas shall demand
    key = None if name is None else plan.environment.get(name) or os.environ.get(name)
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
