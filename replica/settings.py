"""What a replica can be told, and the configuration that it makes.

A new setting is one row in SETTINGS: its key `some_key` is `--some-key` on the command line, `WARMROUTE_SOME_KEY` in
the environment and `some_key` in the file (`replica.options`). A test compares the rows with the fields of
ReplicaConfig.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from click.core import ParameterSource

from api.tokenizer import load_tokenizer
from replica.config import EngineConfig, ReplicaConfig

GIGABYTE = 10**9
NATIVE_IS_MISSING = "the native engine is not part of this version; use --engine simulated"


class Unusable(click.ClickException):
    """Settings that cannot be used; said in one line."""

    exit_code = 2


class FiniteRange(click.FloatRange):
    """A range that neither nan nor inf is in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class Text(click.ParamType[str]):
    """Text that is not empty (an empty key or name would be taken for none), and that can be sent."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail(f"{value!r} is empty; leave the setting out instead.", param, ctx)
        if any("\ud800" <= letter <= "\udfff" for letter in str(value)):  # bytes that are not UTF-8
            self.fail(f"{value!r} is not UTF-8; check the locale.", param, ctx)
        return str(value)


class ModelName(Text):
    """A folder, or a name; what can only be a path has to be a folder, or a typing mistake would become a name."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        model = super().convert(value, param, ctx)
        is_path = model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1
        if is_path and not Path(model).is_dir():
            self.fail(
                f"{model!r} is no folder; name one that exists, or a model without a path, like demo.", param, ctx
            )
        return model


class Setting(NamedTuple):
    key: str
    field: str  # the path below ReplicaConfig; empty where `config_from` knows what to do with it
    type: click.ParamType[Any]
    metavar: str
    help: str
    default: Any = None  # of those without a field

    @property
    def option(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"WARMROUTE_{self.key.upper()}"


TEXT = Text()
MODEL = ModelName()
FILE = click.Path(exists=True, dir_okay=False)
PATH = click.Path(exists=True)
AT_LEAST_0 = FiniteRange(min=0)
ABOVE_0 = FiniteRange(min=0, min_open=True)
COUNT = click.IntRange(min=1)

SETTINGS: dict[str, list[Setting]] = {
    "Model": [
        Setting("model", "", MODEL, "NAME|DIR", "The model: a directory, or a name (demo needs no files)."),
        Setting(
            "served_model_name",
            "",
            TEXT,
            "NAME",
            "What clients ask for, and part of every block key.  [default: --model]",
        ),
        Setting(
            "engine",
            "engine.engine",
            click.Choice(["native", "simulated"]),
            "native|simulated",
            "Compute, or pretend to: the simulated engine makes up its text and keeps its time by a clock.",
        ),
        Setting(
            "tokenizer",
            "",
            PATH,
            "PATH",
            "A directory or a tokenizer.json.  [default: the model's own; without one a token is a byte]",
        ),
        Setting(
            "chat_template", "chat_template", FILE, "FILE", "A chat template in Jinja.  [default: the tokenizer's own]"
        ),
        Setting("max_model_len", "engine.max_model_len", COUNT, "TOKENS", "The longest prompt and output together."),
    ],
    "HTTP": [
        Setting("host", "host", TEXT, "HOST", "The address to listen on."),
        Setting("port", "port", click.IntRange(0, 65535), "PORT", "The port to listen on; 0: any free one."),
        Setting(
            "api_key",
            "api_key",
            TEXT,
            "KEY",
            "Demand this key of clients. Better given as WARMROUTE_API_KEY: everybody's ps shows the command line.",
        ),
        Setting("max_body_bytes", "max_body_bytes", COUNT, "BYTES", "The largest request body."),
        Setting(
            "drain_timeout",
            "drain_timeout_s",
            AT_LEAST_0,
            "SECONDS",
            "How long running requests may go on after SIGTERM.",
        ),
        Setting(
            "die_with_parent", "die_with_parent", click.BOOL, "", "End when the process that started this one ends."
        ),
    ],
    "Cache": [
        Setting("block_size", "engine.block_size", click.IntRange(1, 4096), "TOKENS", "Tokens in a block."),
        Setting("num_blocks", "engine.num_blocks", COUNT, "N", "Blocks in the cache."),
        Setting("kv_cache_gb", "", ABOVE_0, "GB", "Size the cache by memory (10^9 bytes) instead of by --num-blocks."),
        Setting(
            "kv_bytes_per_token",
            "",
            COUNT,
            "BYTES",
            "What a token takes of --kv-cache-gb; 131072 is an 8B model in 16 bits.",
            131072,
        ),
        Setting(
            "enable_prefix_caching",
            "engine.enable_prefix_caching",
            click.BOOL,
            "",
            "Skip the prefill of what the cache holds.",
        ),
    ],
    "Scheduling": [
        Setting("max_num_seqs", "engine.max_num_seqs", COUNT, "N", "Requests that run at once."),
        Setting(
            "max_num_batched_tokens", "engine.max_num_batched_tokens", COUNT, "TOKENS", "Tokens computed in a step."
        ),
        Setting(
            "max_waiting",
            "engine.max_waiting",
            COUNT,
            "N",
            "Requests that may wait; more are refused with status 429.",
        ),
    ],
    "Events": [
        Setting("events", "", click.BOOL, "", "Say what the cache stores and evicts.", True),
        Setting("events_host", "", TEXT, "HOST", "The address that the event sockets listen on; *: all.", "127.0.0.1"),
        Setting(
            "events_port",
            "",
            click.IntRange(0, 65532),
            "PORT",
            "The port of the events; replay, status and snapshot take the next three. 0: any free ones.",
            5557,
        ),
        Setting("events_topic", "engine.topic", TEXT, "TEXT", "The topic.  [default: kv@<replica>@<model>]"),
        Setting(
            "replica_name", "engine.replica", TEXT, "NAME", "This replica's name.  [default: host name and process id]"
        ),
        Setting(
            "curve_secret",
            "engine.curve_secret",
            FILE,
            "FILE",
            "Encrypt the event sockets with this secret key (see `warmroute events keygen`).",
        ),
        Setting(
            "curve_clients",
            "engine.curve_clients",
            click.Path(exists=True, file_okay=False),
            "DIR",
            "Let in only clients whose public keys are here.",
        ),
    ],
    "Simulated engine": [
        Setting(
            "simulated_prefill_tokens_per_s",
            "engine.simulated.prefill_tokens_per_s",
            ABOVE_0,
            "N",
            "Prompt tokens computed in a second.",
        ),
        Setting(
            "simulated_decode_tokens_per_s",
            "engine.simulated.decode_tokens_per_s",
            ABOVE_0,
            "N",
            "Tokens that a request alone generates in a second.",
        ),
        Setting(
            "simulated_batch_slowdown",
            "engine.simulated.batch_slowdown",
            AT_LEAST_0,
            "FRACTION",
            "How much longer each further request in the batch makes a token.",
        ),
        Setting(
            "simulated_step_overhead",
            "engine.simulated.step_overhead_s",
            AT_LEAST_0,
            "SECONDS",
            "What a step takes at least.",
        ),
        Setting(
            "simulated_mean_output_tokens",
            "engine.simulated.mean_output_tokens",
            click.IntRange(min=0),
            "TOKENS",
            "The mean length of an output that ends by itself; 0: none does.",
        ),
    ],
    "Log": [
        Setting(
            "log_level",
            "engine.log_level",
            click.Choice(["debug", "info", "warning", "error"]),
            "LEVEL",
            "debug, info, warning or error.",
        ),
        Setting("log_interval", "engine.log_interval_s", ABOVE_0, "SECONDS", "Log usage and hit rate this often."),
    ],
}

ALL: dict[str, Setting] = {setting.key: setting for rows in SETTINGS.values() for setting in rows}


def config_from(ctx: click.Context) -> ReplicaConfig:
    """What the options say together; a click error says which of them contradict each other or are not possible."""
    values = ctx.params
    if values["engine"] == "native":
        raise Unusable(NATIVE_IS_MISSING)
    if values["curve_clients"] and not values["curve_secret"]:
        raise Unusable("--curve-clients needs a key to encrypt with; give --curve-secret too")
    fields = _fields_from(values)
    tokenizer = _tokenizer_path(values)
    fields["tokenizer"] = tokenizer
    fields["engine"] |= {
        "model": values["served_model_name"] or values["model"],
        "num_blocks": _num_blocks(ctx),
        **_endpoints(values),
        **_vocabulary(tokenizer),
    }
    config = msgspec.convert(fields, ReplicaConfig)
    _check_step(config.engine)
    return config


def _check_step(engine: EngineConfig) -> None:
    tokens, requests = engine.max_num_batched_tokens, engine.max_num_seqs
    if tokens < requests:
        raise Unusable(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {requests}, but a step computes a token "
            f"of every running request; give --max-num-seqs {tokens} or less, or more tokens"
        )


def _fields_from(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are fields of the configuration, as nested objects; what is not given is left out."""
    nested: dict[str, Any] = {"engine": {}}
    for setting in ALL.values():
        if setting.field and values[setting.key] is not None:
            *parents, name = setting.field.split(".")
            inner = nested
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[name] = values[setting.key]
    return nested


def _tokenizer_path(values: Mapping[str, Any]) -> str | None:
    own = Path(values["model"])
    found: str | None = values["tokenizer"] or (str(own) if (own / "tokenizer.json").is_file() else None)
    return found


def _vocabulary(tokenizer_path: str | None) -> dict[str, tuple[int, ...]]:
    """The ids that end an output, and which the simulated engine draws from (never one that ends)."""
    try:
        tokenizer = load_tokenizer(tokenizer_path)
    except (OSError, ValueError) as error:
        raise Unusable(f"--tokenizer {tokenizer_path}: {error}") from error
    ids = {"eos_token_ids": tuple(tokenizer.eos_token_ids)}
    return ids if tokenizer_path is None else ids | {"vocabulary": (0, tokenizer.vocab_size)}


def _num_blocks(ctx: click.Context) -> int:
    """By memory or by number: what is nearer to the command line wins, and both at one place contradict each other."""
    values = ctx.params
    by_number, by_memory = (ctx.get_parameter_source(key) for key in ("num_blocks", "kv_cache_gb"))
    assert by_number is not None and by_memory is not None
    if by_memory is ParameterSource.DEFAULT or by_number < by_memory:
        return int(values["num_blocks"])
    if by_number is by_memory:
        raise Unusable("--num-blocks and --kv-cache-gb both size the cache; give one of them")
    block_bytes = values["kv_bytes_per_token"] * values["block_size"]
    blocks: int = int(values["kv_cache_gb"] * GIGABYTE) // block_bytes
    if not blocks:
        raise Unusable(f"--kv-cache-gb {values['kv_cache_gb']:g} holds no block of {block_bytes:,} bytes")
    return blocks


def _endpoints(values: Mapping[str, Any]) -> dict[str, str | None]:
    if not values["events"]:
        return dict.fromkeys(("events", "replay", "status", "snapshot"))
    host, first = values["events_host"], values["events_port"]
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return {
        socket: f"tcp://{host}:{first + offset if first else 0}"
        for offset, socket in enumerate(("events", "replay", "status", "snapshot"))
    }
