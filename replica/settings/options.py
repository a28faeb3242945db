"""The options of a replica.

A new setting is one row in SETTINGS: its key `some_key` is `--some-key` on the command line, `WARMROUTE_SOME_KEY` in
the environment and `some_key` in the file (`api.process.options`). With `flag=False` it has no option:
`--set some_key=...` gives it. `replica.settings.configure` makes the configuration of them all.
A test compares the rows with the fields of ReplicaConfig.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from api.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from api.process.settings import (
    ABOVE_0,
    AT_LEAST_0,
    COUNT,
    FILE,
    LARGEST,
    PATH,
    TEXT,
    FiniteRange,
    Setting,
    Table,
    Text,
)
from kernels.backends import NAMES as ATTENTION
from replica.config import EngineConfig, ReplicaConfig
from replica.model.sizing import CPU_KV_CACHE_GB
from replica.settings.sizes import HOST_SHARE

AUTO = "auto"  # the type that the model's own configuration names
DEVICES = (AUTO, "cpu", "cuda")
DTYPES = (AUTO, "float32", "bfloat16", "float16")
NATIVE_MAX_STEP_S = 0.5  # a replica says nothing for this long, and a router takes a second without a word for silence


class ModelName(Text):
    """A folder or file, or a name; what can only be a path has to be there, or a typing mistake would become a name."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        model = super().convert(value, param, ctx)
        is_path = model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1
        if is_path and not Path(model).exists():
            self.fail(f"{model!r} is neither a folder nor a file; give one, or a name, like smollm2.", param, ctx)
        return model


MODEL = ModelName()


def _below(path: str, prefix: str = "") -> Callable[..., Setting]:
    """Make the rows of fields below this path of the configuration, which have the key's name unless it is given."""

    def row(key: str, kind: click.ParamType[Any], metavar: str, help: str, *, field: str = "", **more: Any) -> Setting:
        return Setting(prefix + key, path + (field or key), kind, metavar, help, **more)

    return row


http, engine, simulated = _below(""), _below("engine."), _below("engine.simulated.", "simulated_")


def derived(key: str, kind: click.ParamType[Any], metavar: str, help: str, *default: Any, **more: Any) -> Setting:
    """Make the row of a setting that `replica.settings.configure` makes a field of, or several."""
    return Setting(key, "", kind, metavar, help, *default, **more)


SETTINGS: dict[str, list[Setting]] = {
    "Model": [
        derived(
            "model",
            MODEL,
            "NAME|PATH",
            "The model: a directory, a GGUF file, a model to download (ORG/NAME, or smollm2), or demo, which is made.",
            required=True,
        ),
        derived("served_model_name", TEXT, "NAME", "The name for clients and block keys.  [default: that of --model]"),
        engine(
            "engine",
            click.Choice(["native", "simulated"]),
            "native|simulated",
            "Compute, or simulate: the simulated engine makes up text at the pace of a real one.",
        ),
        derived(
            "tokenizer",
            PATH,
            "PATH",
            "A directory or a tokenizer.json.  [default: the model's own; without one a token is a byte]",
        ),
        http("chat_template", FILE, "FILE", "A chat template in Jinja.  [default: the tokenizer's own]"),
        http(
            "tool_call_parser",
            click.Choice(TOOL_FORMATS),
            "NAME",
            f"The format of tool calls: {', '.join(TOOL_FORMATS[2:])}, none: calls are text, or auto: the template's.",
        ),
        http(
            "reasoning_parser",
            click.Choice(REASONING_FORMATS),
            "NAME",
            f"The format of reasoning: {', '.join(REASONING_FORMATS[2:])}, none: it is text, or auto: the template's.",
        ),
        derived(
            "max_model_len",
            click.IntRange(2, LARGEST),
            "TOKENS",
            "The longest prompt and output together.  [default: the model's own limit; 8192 if simulated]",
        ),
    ],
    "Native engine": [
        derived(
            "dtype",
            click.Choice(DTYPES),
            "TYPE",
            "Type for computing and caching: float32, bfloat16, float16, or auto: the model's own.",
            AUTO,
        ),
        engine(
            "attention",
            click.Choice(ATTENTION),
            "NAME",
            f"The kernels of attention: {', '.join(ATTENTION[:-1])} or {ATTENTION[-1]}.",
        ),
        engine(
            "device",
            click.Choice(DEVICES),
            "NAME",
            f"Where to compute: {', '.join(DEVICES[1:])}, or auto: a GPU if there is one.",
        ),
        engine("threads", click.IntRange(1, 1024), "N", "Number of computing threads on a CPU."),
        engine(
            "gpu_memory_utilization",
            FiniteRange(0, 1, min_open=True),
            "FRACTION",
            "Share of a GPU's memory to use; the cache gets the rest after weights and a step.",
        ),
        engine(
            "graphs", click.BOOL, "", "Run small steps as graphs on a GPU: faster, but slower to start.", flag=False
        ),
        derived(
            "lora_modules",
            TEXT,
            "NAME=DIR",
            "Serve the LoRA adapter in this folder, as peft saves it, as a model of this name. May be repeated.",
            multiple=True,
        ),
    ],
    "HTTP": [
        http("host", TEXT, "HOST", "The address to listen on."),
        http("port", click.IntRange(0, 65535), "PORT", "The port to listen on; 0: any free one."),
        http(
            "api_key",
            TEXT,
            "KEY",
            "Require this key from clients. Better given as WARMROUTE_API_KEY: other users can see the command line.",
            secret=True,
        ),
        http("max_body_bytes", COUNT, "BYTES", "The largest request body.", flag=False),
        http(
            "max_bodies_bytes",
            click.IntRange(1, 2**40),
            "BYTES",
            "Memory for all request bodies in progress; beyond it requests are refused with "
            "status 429. A quarter is kept for bodies of at most 1 MiB.",
            flag=False,
        ),
        http(
            "drain_timeout",
            AT_LEAST_0,
            "SECONDS",
            "How long running requests may take to finish after SIGTERM.",
            field="drain_timeout_s",
        ),
        http("die_with_parent", click.BOOL, "", "End when the parent process ends.", flag=False),
    ],
    "Cache": [
        engine("block_size", click.IntRange(1, 4096), "TOKENS", "Tokens in a block."),
        derived(
            "num_blocks",
            COUNT,
            "N",
            "Blocks in the cache.  [default: as many as --kv-cache-gb holds; 8192 if simulated]",
        ),
        derived(
            "kv_cache_gb",
            FiniteRange(0, LARGEST, min_open=True),
            "GB",
            "Size the cache by memory (10^9 bytes) instead of by --num-blocks.  "
            f"[default: a GPU's free memory (--gpu-memory-utilization); {CPU_KV_CACHE_GB:g} on a CPU]",
        ),
        derived(
            "kv_bytes_per_token",
            COUNT,
            "BYTES",
            "Memory of a token in --kv-cache-gb, if simulated; 131072 is an 8B model in 16 bits.",
            131072,
            flag=False,
        ),
        derived(
            "host_kv_gb",
            FiniteRange(0, LARGEST),
            "GB",
            "Host memory (10^9 bytes) for blocks that the cache gives up, from which they come back sooner than they "
            "would be computed; 0: none.  "
            f"[default: {HOST_SHARE:.0%} of the memory that is free at the start; none if simulated]",
        ),
        derived(
            "disk_kv",
            click.Path(),  # made if it is not there
            "DIR",
            "A folder for blocks that survive a restart, behind the host's memory; other models' are never read.",
        ),
        derived("disk_kv_gb", FiniteRange(0, LARGEST, min_open=True), "GB", "Size of --disk-kv (10^9 bytes).", 10.0),
        engine(
            "retained_share",
            FiniteRange(0, 1),
            "FRACTION",
            "The most of the cache that clients may keep by cache_control, to be given up last; 0: none.",
            flag=False,
        ),
        engine("enable_prefix_caching", click.BOOL, "", "Skip the prefill of cached prefixes."),
        engine(
            "partial_reuse",
            click.BOOL,
            "",
            "Reuse the equal beginning of a block that differs later.",
            field="enable_partial_reuse",
            flag=False,
        ),
    ],
    "Scheduling": [
        engine("max_num_seqs", COUNT, "N", "Maximum number of running requests."),
        engine("max_num_batched_tokens", COUNT, "TOKENS", "Most tokens per step."),
        derived(
            "max_step",
            AT_LEAST_0,
            "SECONDS",
            "Target duration of a step with prefill, since other answers wait for its end. "
            f"0: no limit.  [default: {NATIVE_MAX_STEP_S:g}, unless simulated]",
            flag=False,
        ),
        engine(
            "max_waiting",
            COUNT,
            "N",
            "Maximum number of waiting requests; more are refused with status 429.",
            flag=False,
        ),
    ],
    "Events": [
        derived("events", click.BOOL, "", "Publish what the cache stores and evicts.", True),
        derived("events_host", TEXT, "HOST", "The address that the event sockets listen on; *: all.", "127.0.0.1"),
        derived(
            "events_port",
            click.IntRange(0, 65532),
            "PORT",
            "The port for events; replay, status and snapshot use the next three. 0: any free ones.",
            5557,
        ),
        engine("events_topic", TEXT, "TEXT", "The topic.  [default: kv@<replica>@<model>]", field="topic", flag=False),
        engine(
            "replica_name", TEXT, "NAME", "This replica's name.  [default: host name and process id]", field="replica"
        ),
        engine(
            "curve_secret",
            FILE,
            "FILE",
            "Encrypt the event sockets with this secret key (see `warmroute events keygen`).",
        ),
        engine(
            "curve_clients",
            click.Path(exists=True, file_okay=False),
            "DIR",
            "Let in only clients with a public key in this folder.",
        ),
        engine(
            "curve_any_client",
            click.BOOL,
            "",
            "With --curve-secret and without --curve-clients: let in anyone who knows the public key.",
            flag=False,
        ),
        engine("events_max_peers", COUNT, "N", "Connections to each of the event sockets.", flag=False),
        engine(
            "events_replay_mib",
            COUNT,
            "MIB",
            "MiB of the newest event batches to keep for replays (at most 10,000 batches).",
            flag=False,
        ),
    ],
    "Neighbours": [
        engine(
            "kv_secret",
            TEXT,
            "SECRET",
            "Share blocks with the replicas that have the same secret: they read this one's, and it reads theirs. "
            "Better given as WARMROUTE_KV_SECRET: other users can see the command line.",
            secret=True,
        ),
        derived("kv_host", TEXT, "HOST", "The address at which neighbours read blocks; *: all.", "127.0.0.1"),
        derived("kv_port", click.IntRange(0, 65535), "PORT", "The port for that; 0: any free one.", 5556),
        engine(
            "warm_from",
            TEXT,
            "ENDPOINTS",
            "Take the hottest prefixes of these neighbours before the first request, for 10 seconds at most: "
            "tcp://HOST:PORT, with commas.",
            flag=False,
        ),
        engine(
            "role",
            click.Choice(["prefill", "decode", "both"]),
            "prefill|decode|both",
            "Have routers send only prompts to compute for others, only answers to generate, or both.",
        ),
    ],
    "Simulated engine": [
        simulated("prefill_tokens_per_s", ABOVE_0, "N", "Prompt tokens computed per second.", flag=False),
        simulated("decode_tokens_per_s", ABOVE_0, "N", "Tokens per second for a single request.", flag=False),
        simulated(
            "batch_slowdown",
            AT_LEAST_0,
            "FRACTION",
            "Slowdown of a token per further request in the batch.",
            flag=False,
        ),
        simulated(
            "step_overhead", AT_LEAST_0, "SECONDS", "Minimum duration of a step.", field="step_overhead_s", flag=False
        ),
        simulated(
            "mean_output_tokens",
            click.IntRange(0, LARGEST),
            "TOKENS",
            "Mean length of outputs that end by themselves; 0: none do.",
            flag=False,
        ),
        derived("simulated_answers", FILE, "FILE", "Answer chats from a script: in each line the JSON of a rule."),
    ],
    "Log": [
        engine(
            "log_level", click.Choice(["debug", "info", "warning", "error"]), "LEVEL", "debug, info, warning or error."
        )
    ],
}

TABLE = Table("warmroute replica", SETTINGS, ReplicaConfig(engine=EngineConfig(model="")))
ALL = TABLE.all
