"""Flags for vLLM and SGLang, read by their own parsers; their publishers, with the parsed options.

Needs their sources: WARMROUTE_VLLM_SOURCE and WARMROUTE_SGLANG_SOURCE are folders in which the packages are (an
unpacked wheel is enough), and WARMROUTE_ENGINES_PYTHON a Python that can import them (without it, that of the tests).
No model and no GPU is needed: nothing but options and event publishers is made.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.sglang import MODULE as SGLANG_MODULE
from events.source import Source
from events.subscriber import Subscriber
from fleet.host.engines import Launch, launch
from fleet.plan import Engine, Task
from fleet.toml.plan_file import parse_fleet

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

STARTS_S = 120.0  # to import their dependencies
FOLLOWS_S = 50.0

# Without a GPU vLLM detects no platform, and its options need one.
VLLM = """
import json, sys
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()
vllm.platforms.current_platform = vllm.platforms._current_platform
"""
VLLM_PARSER = """
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before 0.30 or so
    from vllm.entrypoints.openai.cli_args import make_arg_parser
arguments = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(sys.argv[1:])
found = {key: value for key, value in vars(arguments).items() if isinstance(value, str | int | float | list | None)}
print(json.dumps(found | {"kv_events_config": vars(arguments.kv_events_config)}, default=str))
"""
VLLM_PUBLISHER = """
import time
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, EventPublisherFactory, KVEventBatch
publisher = EventPublisherFactory.create(KVEventsConfig(**json.loads(sys.argv[1])), 0)
print("bound", flush=True)
for number in range(100_000):
    tokens = [number, 1, 2, 3]
    block = BlockStored([number + 1], None, tokens, 4, None, "GPU", None)
    publisher.publish(KVEventBatch(ts=time.time(), events=[block]))
    time.sleep(0.01)
"""
SGLANG = "import json, sys\n"
SGLANG_PARSER = """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang.launch_server")
ServerArgs.add_cli_args(parser)
arguments = vars(parser.parse_args(sys.argv[1:]))
found = {key: value for key, value in arguments.items() if isinstance(value, str | int | float | list | None)}
from sglang.srt.disaggregation.kv_events import KVEventsConfig
print(json.dumps(found | {"kv_events_config": KVEventsConfig.from_cli(found["kv_events_config"]).model_dump()}))
"""
SGLANG_PUBLISHER = """
import time
from sglang.srt.disaggregation.kv_events import BlockStored, EventPublisherFactory, KVEventBatch
publisher = EventPublisherFactory.create(sys.argv[1], 0)
print("bound", flush=True)
for number in range(100_000):
    block = BlockStored([number + 1], None, [number, 1, 2, 3], 4, None)
    publisher.publish(KVEventBatch(ts=time.time(), events=[block]))
    time.sleep(0.01)
"""
PARSERS = {"vllm": VLLM + VLLM_PARSER, "sglang": SGLANG + SGLANG_PARSER}
PUBLISHERS = {"vllm": VLLM + VLLM_PUBLISHER, "sglang": SGLANG + SGLANG_PUBLISHER}

FILE = """
[[models]]
name = "qwen"
model = "org/qwen"
engine = "{engine}"
tensor_parallel = 2
tokenizer = "{folder}"
chat_template = "{folder}/tokenizer.json"
options = {options}
"""
OPTIONS = {
    "vllm": "{max-model-len = 4096, enforce-eager = true, enable-chunked-prefill = false, "
    'lora-modules = ["a=b", "c=d"], hf-overrides = {rope_theta = 1}}',
    "sglang": "{page-size = 16, disable-overlap-schedule = true, mem-fraction-static = 0.5, "
    'lora-paths = ["a=b", "c=d"]}',
}
ENGINES: list[Engine] = ["vllm", "sglang"]


def source(engine: Engine) -> str:
    variable = f"WARMROUTE_{engine.upper()}_SOURCE"
    folder = os.environ.get(variable)
    if folder is None:
        pytest.skip(f"{variable} names no folder with the package {engine}")
    return folder


def program(engine: Engine, code: str, *words: str) -> tuple[list[str], dict[str, str]]:
    python = os.environ.get("WARMROUTE_ENGINES_PYTHON", sys.executable)
    return [python, "-W", "ignore", "-c", code, *words], os.environ | {"PYTHONPATH": source(engine)}


def parsed(engine: Engine, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command, environment = program(engine, PARSERS[engine], *words)
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=STARTS_S)
    missing = "ModuleNotFoundError" in finished.stderr
    if missing:
        pytest.skip(f"{engine} cannot be imported: {finished.stderr.splitlines()[-1]}; see WARMROUTE_ENGINES_PYTHON")
    return finished


def started(engine: Engine, folder: Path) -> Launch:
    (folder / "tokenizer.json").write_text("{}")
    text = FILE.format(engine=engine, folder=folder, options=OPTIONS[engine])
    [plan] = parse_fleet("fleet.toml", text).models
    return launch(Task(name="qwen-0", plan=plan), "127.0.0.1", "one")


def words_of(engine: Engine, start: Launch) -> tuple[str, ...]:
    """Arguments of the engine's parser: the words after `vllm serve`, or after the module."""
    return start.command[start.command.index("serve" if engine == "vllm" else SGLANG_MODULE) + 1 :]


@pytest.mark.parametrize("engine", ENGINES)
def test_its_parser_takes_every_flag(engine: Engine, tmp_path: Path) -> None:
    start = started(engine, tmp_path)
    finished = parsed(engine, words_of(engine, start))
    assert finished.returncode == 0, finished.stderr
    said = json.loads(finished.stdout.splitlines()[-1])
    assert start.place is not None
    assert start.place.events is not None
    own = {
        "vllm": {
            "model_tag": "org/qwen",
            "served_model_name": ["qwen"],
            "tensor_parallel_size": 2,
            "enable_prefix_caching": True,
            "enable_prompt_tokens_details": True,
            "tokenizer": str(tmp_path),
            "max_model_len": 4096,
            "enforce_eager": True,
            "enable_chunked_prefill": False,
        },
        "sglang": {
            "model_path": "org/qwen",
            "served_model_name": "qwen",
            "tp_size": 2,
            "enable_metrics": True,
            "enable_cache_report": True,
            "tokenizer_path": str(tmp_path),
            "page_size": 16,
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.5,
        },
    }
    expected: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": int(start.place.url.rpartition(":")[2]),
        "chat_template": str(tmp_path / "tokenizer.json"),
        **own[engine],
    }
    assert {key: said[key] for key in expected} == expected
    events = said["kv_events_config"]
    assert events["publisher"] == "zmq"
    assert events["replay_endpoint"] == start.place.replay
    assert events["endpoint"].endswith(start.place.events.rpartition(":")[2])
    assert events["topic"] == "kv@qwen-0@qwen"
    assert events.get("enable_kv_cache_events", True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flag_that_it_does_not_have_would_be_noticed(engine: Engine, tmp_path: Path) -> None:
    words = (*words_of(engine, started(engine, tmp_path)), "--no-such-flag")
    assert parsed(engine, words).returncode == 2


@contextmanager
def publishing(engine: Engine, config: str) -> Iterator[None]:
    command, environment = program(engine, PUBLISHERS[engine], config)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(line == "bound\n" for line in process.stdout), "the engine exited before it published anything"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("engine", ENGINES)
async def test_its_publisher_is_followed_from_the_first_event(engine: Engine, tmp_path: Path) -> None:
    """A late subscriber gets earlier events from the replay socket."""
    start = started(engine, tmp_path)
    words = words_of(engine, start)
    assert parsed(engine, words).returncode == 0
    assert start.place is not None
    config = words[words.index("--kv-events-config") + 1]
    with publishing(engine, config):
        async with Subscriber() as subscriber:
            view = subscriber.add(Source("qwen-0", str(start.place.events), start.place.replay, model="qwen"))
            deadline = time.monotonic() + FOLLOWS_S
            while len(view.resolver.keys()) < 100 or view.inexact is not None:
                assert time.monotonic() < deadline, (len(view.resolver.keys()), view.inexact)
                await asyncio.sleep(0.01)
            assert len(view.resolver.keys()) == (view.stream.last_seq or 0) + 1
