"""The options of a replica.

A new setting is one row in SETTINGS: its key `some_key` is `--some-key` on the command line, `WARMROUTE_SOME_KEY` in
the environment and `some_key` in the file (`api.options`); `replica.configure` makes the configuration of them all.
A test compares the rows with the fields of ReplicaConfig.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from api.settings import (
    ABOVE_0,
    AT_LEAST_0,
    COUNT,
    FILE,
    LARGEST,
    PATH,
    SPECIAL_TOKENS_IN_TEXT,
    TEXT,
    FiniteRange,
    Setting,
    Table,
    Text,
)
from kernels.backends import NAMES as ATTENTION
from replica.config import EngineConfig, ReplicaConfig
from replica.native_model import AUTO, CPU_KV_CACHE_GB, DEVICES, DTYPES

NATIVE_MAX_STEP_S = 1.0


class ModelName(Text):
    """A folder, or a name; what can only be a path has to be a folder, or a typing mistake would become a name."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        model = super().convert(value, param, ctx)
        is_path = model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1
        if is_path and not Path(model).is_dir():
            self.fail(f"{model!r} is no folder; name one that exists, or a model by its name, like demo.", param, ctx)
        return model


MODEL = ModelName()


def _below(path: str, prefix: str = "") -> Callable[..., Setting]:
    """Make the rows of fields below this path of the configuration, which have the key's name unless it is given."""

    def row(key: str, kind: click.ParamType[Any], metavar: str, help: str, *, field: str = "", **more: Any) -> Setting:
        return Setting(prefix + key, path + (field or key), kind, metavar, help, **more)

    return row


http, engine, simulated = _below(""), _below("engine."), _below("engine.simulated.", "simulated_")


def derived(key: str, kind: click.ParamType[Any], metavar: str, help: str, *default: Any, **more: Any) -> Setting:
    """Make the row of a setting that `replica.configure` makes a field of, or several."""
    return Setting(key, "", kind, metavar, help, *default, **more)


SETTINGS: dict[str, list[Setting]] = {
    "Model": [
        derived(
            "model",
            MODEL,
            "NAME|DIR",
            "The model: a directory, the name of one to download (ORG/NAME), or demo, which is made on first use.",
            required=True,
        ),
        derived(
            "served_model_name", TEXT, "NAME", "What clients ask for, and part of every block key.  [default: --model]"
        ),
        engine(
            "engine",
            click.Choice(["native", "simulated"]),
            "native|simulated",
            "Compute, or pretend to: the simulated engine makes up its text and keeps its time by a clock.",
        ),
        derived(
            "tokenizer",
            PATH,
            "PATH",
            "A directory or a tokenizer.json.  [default: the model's own; without one a token is a byte]",
        ),
        http("chat_template", FILE, "FILE", "A chat template in Jinja.  [default: the tokenizer's own]"),
        SPECIAL_TOKENS_IN_TEXT,
        derived(
            "max_model_len",
            click.IntRange(2, LARGEST),
            "TOKENS",
            "The longest prompt and output together.  [default: what the model was made for; 8192 if simulated]",
        ),
    ],
    "Native engine": [
        derived(
            "dtype",
            click.Choice(DTYPES),
            "TYPE",
            "What to compute and to cache in: float32, bfloat16, float16, or auto: what the model says.",
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
        engine("threads", click.IntRange(1, 1024), "N", "Threads that compute, on a CPU."),
        engine(
            "gpu_memory_utilization",
            FiniteRange(0, 1, min_open=True),
            "FRACTION",
            "Of a GPU's memory, how much may be taken in all; what weights and a step leave of it is for the cache.",
        ),
        engine("graphs", click.BOOL, "", "On a GPU, small steps are graphs: faster, after some seconds at the start."),
    ],
    "HTTP": [
        http("host", TEXT, "HOST", "The address to listen on."),
        http("port", click.IntRange(0, 65535), "PORT", "The port to listen on; 0: any free one."),
        http(
            "api_key",
            TEXT,
            "KEY",
            "Demand this key of clients. Better given as WARMROUTE_API_KEY: everybody's ps shows the command line.",
            secret=True,
        ),
        http("max_body_bytes", COUNT, "BYTES", "The largest request body."),
        http(
            "max_bodies_bytes",
            click.IntRange(1, 2**40),
            "BYTES",
            "The memory that all request bodies in progress may take together; beyond it requests are refused with "
            "status 429. A quarter is kept for bodies of at most 1 MiB.",
        ),
        http(
            "drain_timeout",
            AT_LEAST_0,
            "SECONDS",
            "How long running requests may go on after SIGTERM.",
            field="drain_timeout_s",
        ),
        http("die_with_parent", click.BOOL, "", "End when the process that started this one ends."),
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
            f"[default: what a GPU has left (--gpu-memory-utilization); {CPU_KV_CACHE_GB:g} on a CPU]",
        ),
        derived(
            "kv_bytes_per_token",
            COUNT,
            "BYTES",
            "What a token takes of --kv-cache-gb, if simulated; 131072 is an 8B model in 16 bits.",
            131072,
        ),
        engine("enable_prefix_caching", click.BOOL, "", "Skip the prefill of what the cache holds."),
        engine(
            "partial_reuse",
            click.BOOL,
            "",
            "Of a block that differs only from some token on, reuse what comes before.",
            field="enable_partial_reuse",
        ),
    ],
    "Scheduling": [
        engine("max_num_seqs", COUNT, "N", "Requests that run at once."),
        engine("max_num_batched_tokens", COUNT, "TOKENS", "Tokens computed in a step."),
        derived(
            "max_step",
            AT_LEAST_0,
            "SECONDS",
            "What a step with prefill should take at most, by the one before; other answers wait for its end. "
            f"0: no limit.  [default: {NATIVE_MAX_STEP_S:g}, unless simulated]",
        ),
        engine("max_waiting", COUNT, "N", "Requests that may wait; more are refused with status 429."),
    ],
    "Events": [
        derived("events", click.BOOL, "", "Say what the cache stores and evicts.", True),
        derived("events_host", TEXT, "HOST", "The address that the event sockets listen on; *: all.", "127.0.0.1"),
        derived(
            "events_port",
            click.IntRange(0, 65532),
            "PORT",
            "The port of the events; replay, status and snapshot take the next three. 0: any free ones.",
            5557,
        ),
        engine("events_topic", TEXT, "TEXT", "The topic.  [default: kv@<replica>@<model>]", field="topic"),
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
            "Let in only clients whose public keys are here.",
        ),
        engine(
            "curve_any_client",
            click.BOOL,
            "",
            "With --curve-secret and without --curve-clients: let in anyone who knows the public key.",
        ),
        engine("events_max_peers", COUNT, "N", "Connections to each of the event sockets."),
        engine(
            "events_replay_mib",
            COUNT,
            "MIB",
            "The newest event batches are kept for replays, so many MiB of them (and 10,000 at most).",
        ),
    ],
    "Simulated engine": [
        simulated("prefill_tokens_per_s", ABOVE_0, "N", "Prompt tokens computed in a second."),
        simulated("decode_tokens_per_s", ABOVE_0, "N", "Tokens that a request alone generates in a second."),
        simulated(
            "batch_slowdown", AT_LEAST_0, "FRACTION", "How much longer each further request in the batch makes a token."
        ),
        simulated("step_overhead", AT_LEAST_0, "SECONDS", "What a step takes at least.", field="step_overhead_s"),
        simulated(
            "mean_output_tokens",
            click.IntRange(0, LARGEST),
            "TOKENS",
            "The mean length of an output that ends by itself; 0: none does.",
        ),
    ],
    "Log": [
        engine(
            "log_level", click.Choice(["debug", "info", "warning", "error"]), "LEVEL", "debug, info, warning or error."
        ),
        engine("log_interval", ABOVE_0, "SECONDS", "Log usage and hit rate this often.", field="log_interval_s"),
    ],
}

TABLE = Table("warmroute replica", SETTINGS, ReplicaConfig(engine=EngineConfig(model="")))
ALL = TABLE.all
