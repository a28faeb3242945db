"""Start commands of replicas: commands that ours parses, and flags of other engines."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from engines.sglang import MODULE as SGLANG_MODULE
from events.source import Source
from fleet.host.engines import Launch, engine_missing, launch
from fleet.plan import Engine, ModelPlan, Resources, Task
from replica.cli import replica

HOST = "127.0.0.1"


def start(plan: ModelPlan, host: str = HOST) -> Launch:
    return launch(Task(name="qwen-0", plan=plan), host, "one")


def foreign(engine: Engine, **more: object) -> ModelPlan:
    return ModelPlan(name="qwen", model="org/qwen", engine=engine, **more)  # type: ignore[arg-type]


def after(command: tuple[str, ...], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def params(command: tuple[str, ...]) -> dict[str, object]:
    """Parameters that `warmroute replica` parses from the command."""
    words = list(command[command.index("replica") + 1 :])
    with replica.make_context("warmroute replica", words) as ctx:
        return ctx.params


# ---- ours


def test_the_replica_takes_its_command(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("")
    plan = ModelPlan(
        name="small",
        model="demo",
        engine="simulated",
        options=("--num-blocks=64", "--no-events"),
        drain_timeout_s=2.5,
        tokenizer=str(tmp_path),
        chat_template=str(template),
    )
    command = start(plan).command
    assert command[0] == sys.executable
    said = params(command)
    expected = {
        "model": "demo",
        "served_model_name": "small",
        "engine": "simulated",
        "host": HOST,
        "port": 0,
        "events_host": HOST,
        "events_port": 0,
        "kv_host": HOST,
        "kv_port": 0,
        "replica_name": "qwen-0",
        "die_with_parent": True,
        "drain_timeout": 2.5,
        "num_blocks": 64,
        "events": False,
        "tokenizer": str(tmp_path),
        "chat_template": str(template),
    }
    assert {key: said[key] for key in expected} == expected


def test_what_the_fleet_says_counts_whatever_the_options_say() -> None:
    said = params(start(ModelPlan(name="small", model="demo", options=("--port=1", "--engine=simulated"))).command)
    assert (said["port"], said["engine"]) == (0, "native")


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda"), (0.5, "cuda")])
def test_ours_computes_on_a_gpu_if_it_was_given_one(gpus: float, device: str) -> None:
    plan = ModelPlan(name="small", model="demo", resources=Resources(gpus=gpus))
    assert params(start(plan).command)["device"] == device
    other = params(start(msgspec.structs.replace(plan, options=("--device", "auto"))).command)
    assert other["device"] == "auto"


def test_the_key_is_in_the_environment_never_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_KEY", "hidden")
    ours = start(ModelPlan(name="small", model="demo", api_key_env="QWEN_KEY", environment={"A": "b"}))
    assert ours.environment == {"A": "b", "WARMROUTE_API_KEY": "hidden"}
    vllm = start(foreign("vllm", api_key_env="QWEN_KEY"))
    assert vllm.environment["VLLM_API_KEY"] == "hidden"
    sglang = start(foreign("sglang", api_key_env="QWEN_KEY"))
    assert sglang.environment["WARMROUTE_SGLANG_API_KEY"] == "hidden"
    assert not any("hidden" in word for word in (*ours.command, *vllm.command, *sglang.command))


def test_commands_are_made_without_anything_heavy() -> None:
    code = "import sys, fleet.host.engines; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "fleet.host.engines" in loaded
    assert {"torch", "numpy", "ray", "fastapi", "vllm", "sglang", "replica", "router"}.isdisjoint(loaded)


def test_a_group_serves_the_name_of_its_model_in_its_role() -> None:
    plan = ModelPlan(name="qwen-prefill", model="demo", serves="qwen", role="prefill")
    said = params(start(plan).command)
    assert (said["served_model_name"], said["role"]) == ("qwen", "prefill")
    found = start(ModelPlan(name="p", model="a/b", engine="vllm", serves="qwen", role="prefill"))
    assert after(found.command, "--served-model-name") == "qwen"
    assert "--role" not in found.command, "vLLM has no such option"
    assert found.place is not None and found.place.model == "qwen"


# ---- other engines


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_another_engine_listens_where_its_place_says(engine: Engine) -> None:
    started = start(foreign(engine))
    assert started.place is not None
    port = after(started.command, "--port")
    assert started.place.url == f"http://{HOST}:{port}"
    assert after(started.command, "--host") == HOST
    assert after(started.command, "--served-model-name") == started.place.model == "qwen"
    assert (started.place.engine, started.place.incarnation) == (engine, "one")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_events_are_published_where_its_place_says(engine: Engine) -> None:
    started = start(foreign(engine))
    assert started.place is not None
    assert started.place.events is not None
    assert started.place.replay is not None
    config = json.loads(after(started.command, "--kv-events-config"))
    assert config.pop("enable_kv_cache_events", True)
    assert config == {
        "publisher": "zmq",
        "endpoint": started.place.events.replace(HOST, f"[::ffff:{HOST}]"),
        "replay_endpoint": started.place.replay,
        "topic": "kv@qwen-0@qwen",
    }
    Source("qwen-0", started.place.events, started.place.replay).check()


def test_the_endpoint_is_that_one_address_and_no_other() -> None:
    """Written so that their publishers bind, and do not connect; `tcp://*` would be the negative control."""
    started = start(foreign("vllm"))
    endpoint = json.loads(after(started.command, "--kv-events-config"))["endpoint"]
    port = int(endpoint.rpartition(":")[2])
    assert "::" in endpoint
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.bind(endpoint)
        socket.create_connection((HOST, port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_its_own_options_come_before_those_of_the_fleet(engine: Engine) -> None:
    command = start(foreign(engine, options=("--port", "1", "--x=2"))).command
    assert command.index("--x=2") < command.index("--served-model-name")
    last = len(command) - 1 - command[::-1].index("--port")
    assert command[last + 1] != "1"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tokenizer_and_template_are_those_of_the_router(engine: Engine) -> None:
    command = start(foreign(engine, tokenizer="/t", chat_template="/c", tensor_parallel=4)).command
    assert after(command, "--tokenizer" if engine == "vllm" else "--tokenizer-path") == "/t"
    assert after(command, "--chat-template") == "/c"
    assert after(command, "--tensor-parallel-size" if engine == "vllm" else "--tp-size") == "4"


def test_it_does_not_take_packages_of_this_folder_for_its_own() -> None:
    assert start(foreign("sglang")).environment["PYTHONSAFEPATH"] == "1"
    assert start(foreign("vllm", environment={"PYTHONSAFEPATH": ""})).environment["PYTHONSAFEPATH"] == ""


# ---- is it there at all


@pytest.fixture
def _bare_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def program(folder: Path, name: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o700)
    return str(folder / name)


@pytest.mark.usefixtures("_bare_node")
def test_a_node_without_the_program_is_told_what_to_do() -> None:
    assert "this node has no program vllm; install vLLM" in str(engine_missing(foreign("vllm")))
    assert "this node has no Python with sglang; install SGLang" in str(engine_missing(foreign("sglang")))
    assert engine_missing(ModelPlan(name="small", model="demo")) is None


@pytest.mark.usefixtures("_bare_node")
def test_a_program_is_found_in_the_path_beside_python_or_where_the_plan_says(tmp_path: Path) -> None:
    own = program(tmp_path / "own", "vllm")
    plan = foreign("vllm", environment={"PATH": str(tmp_path / "own")})
    assert engine_missing(plan) is None
    assert start(plan).command[:3] == (own, "serve", "org/qwen")
    assert engine_missing(foreign("vllm")) is not None
    found = program(tmp_path, "vllm")
    assert engine_missing(foreign("vllm")) is None
    assert start(foreign("vllm")).command[0] == found


@pytest.mark.usefixtures("_bare_node")
def test_sglang_runs_in_the_python_that_the_plan_names(tmp_path: Path) -> None:
    python = program(tmp_path / "own", "python3")
    plan = foreign("sglang", environment={"PATH": str(tmp_path / "own")})
    assert engine_missing(plan) is None
    assert start(plan).command[:3] == (python, "-c", SGLANG_MODULE)
    assert start(foreign("sglang")).command[0] == sys.executable


def test_a_node_of_ipv6_is_refused_for_engines_that_publish_only_over_ipv4() -> None:
    assert "give the node an IPv4 address" in str(engine_missing(foreign("vllm"), "fd00::1"))
    assert engine_missing(ModelPlan(name="small", model="demo"), "fd00::1") is None
