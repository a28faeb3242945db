"""The configuration that the settings make together, or one line that says why they cannot."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from click.core import ParameterSource

from api.http.bodies import check_limits
from api.model_files import read_model_file
from api.openai.requests import LONGEST_NAME
from api.openai.sampling import sampling_defaults
from api.process.options import nested_fields
from api.process.settings import LARGEST, Unusable
from api.tokens.tokenizer import eos_token_ids, load_tokenizer
from replica.config import AnswerRule, LoraModule, ReplicaConfig
from replica.model.config import ModelConfig, read_config
from replica.model.locate import SMOLLM2, locate, short_name
from replica.model.sizing import GIGABYTE, blocks_in
from replica.neighbours.connection import host_and_port
from replica.settings.options import ALL, AUTO, NATIVE_MAX_STEP_S, TABLE
from replica.settings.sizes import HOST_SHARE, free_bytes

SHORTEST_SECRET = 16
NEEDED = ("torch", "safetensors")
MAX_ANSWERS_BYTES = 1024 * 1024
ONLY_FOR = {
    "kv_bytes_per_token": "simulated",
    "simulated_answers": "simulated",
    "host_kv_gb": "native",
    "disk_kv": "native",
    "lora_modules": "native",
}


class NativeModel(NamedTuple):
    folder: Path
    config: ModelConfig
    dtype: str
    max_model_len: int

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.kv_bytes_per_token(self.dtype)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return eos_token_ids(self.folder)


def find_model(name: str, dtype: str, max_model_len: int | None) -> NativeModel:
    """May download it, or make the demo. ValueError, OSError: it cannot be had, or not be computed like that."""
    if name == SMOLLM2:
        from replica.fetching.fetch import smollm2_folder

        folder: Path | None = smollm2_folder()
    else:
        folder = locate(name)
    if folder is None:
        raise ValueError(
            f"{name!r} is not a model; give smollm2, demo, a folder with its files, or ORG/NAME to download"
        )
    config = read_config(folder)
    sampling_defaults(folder)  # the server reads them again
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"{name} has {longest} positions, so --max-model-len {max_model_len} is too long; give {longest} or less"
        )
    return NativeModel(folder, config, config.dtype if dtype == AUTO else dtype, max_model_len or longest)


def check_installed() -> None:
    """Before anything is downloaded; and here it is in sight of the dispatcher, which names the extra to install."""
    for module in NEEDED:
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"the native engine needs {module}", name=module)


def config_from(ctx: click.Context) -> ReplicaConfig:
    """Make a configuration of the options; a click error names those that contradict each other or are not possible.

    The native engine's model is found here: it may have to be downloaded, or made.
    """
    values = ctx.params
    check_combinations(ctx)
    model = None
    if values["engine"] == "native":
        check_installed()
        name = values["model"]
        if "/" in name and not Path(name).exists():
            click.echo(f"Getting {name} from the hub, or from its cache here", err=True)
        try:
            model = find_model(name, values["dtype"], values["max_model_len"])
        except (OSError, ValueError) as error:
            raise Unusable(f"--model: {error}") from error
    fields = nested_fields(TABLE, values)
    own = Path(values["model"]) if model is None else model.folder
    tokenizer: str | None = values["tokenizer"] or (str(own) if (own / "tokenizer.json").is_file() else None)
    fields["tokenizer"] = tokenizer
    fields["simulated_answers"] = _answers(values["simulated_answers"])
    sockets, first = ("events", "replay", "status", "snapshot"), values["events_port"]
    host = _bracketed(values["events_host"])
    fields["engine"] |= {
        "model": values["served_model_name"] or short_name(values["model"]),
        **_num_blocks(ctx, model),
        **{
            socket: f"tcp://{host}:{first + offset if first else 0}" if values["events"] else None
            for offset, socket in enumerate(sockets)
        },
        **_vocabulary(tokenizer, model),
        "lora_modules": _lora_modules(values),
        **_tiers(values, model),
        "kv_read": _kv_read(values),
    }
    if model is not None:
        fields["engine"] |= {
            "model_path": str(model.folder),
            "dtype": model.dtype,
            "vocabulary": (0, model.config.vocab_size),
            "max_model_len": model.max_model_len,
            "max_step_s": NATIVE_MAX_STEP_S,
        }
    elif values["max_model_len"]:
        fields["engine"]["max_model_len"] = values["max_model_len"]
    if values["max_step"] is not None:
        fields["engine"]["max_step_s"] = float(values["max_step"])
    return msgspec.convert(fields, ReplicaConfig)


def check_combinations(ctx: click.Context) -> None:
    """Check the options as far as no model is needed for it."""
    values = ctx.params
    secret, clients, anyone = (values[f"curve_{key}"] for key in ("secret", "clients", "any_client"))
    for given, option in ((clients, "--curve-clients"), (anyone, "curve_any_client")):
        if given and not secret:
            raise Unusable(f"{option} needs an encryption key; give --curve-secret too")
    if clients and anyone:
        raise Unusable(f"--curve-clients {clients} lets in some and curve_any_client all; give one of them")
    if secret and not (clients or anyone):
        raise Unusable(
            f"--curve-secret {secret} alone would let in anyone who knows the public key, and events carry prompts; "
            "give --curve-clients DIR with the public keys of those to let in, or say --set curve_any_client=true"
        )
    check_limits(values)
    tokens, requests = values["max_num_batched_tokens"], values["max_num_seqs"]
    if tokens < requests:
        raise Unusable(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {requests}, but a step computes a token "
            f"of every running request; give --max-num-seqs {tokens} or less, or more tokens"
        )
    if values["num_blocks"] and ctx.get_parameter_source("num_blocks") is ctx.get_parameter_source("kv_cache_gb"):
        raise Unusable("--num-blocks and --kv-cache-gb both size the cache; give one of them")
    for key, engine in ONLY_FOR.items():
        is_given = ctx.get_parameter_source(key) is not ParameterSource.DEFAULT
        if is_given and values["engine"] != engine:
            option = ALL[key].option if ALL[key].flag else key
            raise Unusable(f"{option} {values[key]} is only for the {engine} engine; leave it out")
    disk_gb, is_default = values["disk_kv_gb"], ctx.get_parameter_source("disk_kv_gb") is ParameterSource.DEFAULT
    if values["disk_kv"] is None and not is_default:
        raise Unusable(f"--disk-kv-gb {disk_gb:g} is the size of --disk-kv; give --disk-kv DIR too, or leave it out")


def _answers(file: str | None) -> tuple[AnswerRule, ...]:
    rules, where = [], ""
    try:
        lines = [] if file is None else read_model_file(Path(file), MAX_ANSWERS_BYTES).splitlines()
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number} is not a rule: "
            if line.strip():
                rules.append(msgspec.json.decode(line, type=AnswerRule))
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise Unusable(f"--simulated-answers: {where}{error}") from error
    return tuple(rules)


def _lora_modules(values: Mapping[str, Any]) -> list[LoraModule]:
    found: dict[str, str] = {}
    taken = values["served_model_name"] or short_name(values["model"])
    for given in values["lora_modules"]:
        name, _, folder = given.partition("=")
        if not name or not folder or len(name) > LONGEST_NAME:
            example = f"a name of at most {LONGEST_NAME} characters and a folder, like sql=adapters/sql"
            raise Unusable(f"--lora-modules {given}: give {example}")
        if name in found or name == taken:
            raise Unusable(f"--lora-modules {given}: the name {name!r} is given twice; give each adapter its own")
        if not Path(folder).is_dir():
            raise Unusable(f"--lora-modules {given}: {folder!r} is not a folder; give one with adapter_config.json")
        found[name] = str(Path(folder).absolute())
    return [LoraModule(*one) for one in found.items()]


def _vocabulary(tokenizer_path: str | None, model: NativeModel | None) -> dict[str, tuple[int, ...]]:
    """The ids that end an output, and which the simulated engine draws from (never one that ends)."""
    try:
        tokenizer = load_tokenizer(tokenizer_path)
        own = () if model is None else model.eos_token_ids
    except (OSError, ValueError) as error:
        named = "--model" if tokenizer_path is None else f"--tokenizer {tokenizer_path}"
        raise Unusable(f"{named}: {error}") from error
    if tokenizer_path is not None:
        ids = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *own)))
        return {"eos_token_ids": ids, "vocabulary": (0, tokenizer.vocab_size)}
    # A model without a tokenizer knows nothing of the special tokens that follow after the bytes.
    return {"eos_token_ids": tokenizer.eos_token_ids if model is None else own}


def _num_blocks(ctx: click.Context, model: NativeModel | None) -> dict[str, int]:
    """Size the cache by memory or by number: the source nearest to the command line wins."""
    values = ctx.params
    by_number, by_memory = (ctx.get_parameter_source(key) for key in ("num_blocks", "kv_cache_gb"))
    assert by_number is not None and by_memory is not None
    if values["num_blocks"] and by_number < by_memory:
        return {"num_blocks": values["num_blocks"]}
    memory_gb = values["kv_cache_gb"]
    if memory_gb is None:
        return {} if model is None else {"num_blocks": 0}
    bytes_per_token = values["kv_bytes_per_token"] if model is None else model.kv_bytes_per_token
    blocks = blocks_in(memory_gb * GIGABYTE, values["block_size"], bytes_per_token)
    if not blocks:
        block_bytes = bytes_per_token * values["block_size"]
        raise Unusable(f"--kv-cache-gb {memory_gb:g} holds no block of {block_bytes:,} bytes; give more")
    if blocks > LARGEST:
        raise Unusable(f"--kv-cache-gb {memory_gb:g} holds {blocks:,} blocks; give less: {LARGEST:,} are the most")
    return {"num_blocks": blocks}


def _kv_read(values: Mapping[str, Any]) -> str | None:
    secret, host = values["kv_secret"], values["kv_host"]
    if secret is None:
        return None
    if len(secret) < SHORTEST_SECRET:
        raise Unusable(
            f"--kv-secret has {len(secret)} characters, which a stranger could guess; give at least {SHORTEST_SECRET}, "
            "like those of: openssl rand -hex 32"
        )
    endpoint = f"tcp://{_bracketed(host)}:{values['kv_port']}"
    try:
        host_and_port(endpoint)
    except ValueError as error:
        raise Unusable(f"--kv-host {host} is no address; give a name or an IP address") from error
    return endpoint


def _tiers(values: Mapping[str, Any], model: NativeModel | None) -> dict[str, Any]:
    if model is None:
        return {}
    block_bytes, host_gb = values["block_size"] * model.kv_bytes_per_token, values["host_kv_gb"]
    if not values["enable_prefix_caching"]:
        host_gb = 0.0
    elif host_gb is None:
        host_gb = free_bytes() * HOST_SHARE / GIGABYTE
    sizes = {"host_blocks": min(LARGEST, int(host_gb * GIGABYTE / block_bytes))}
    if values["disk_kv"] is None:
        return sizes
    if not values["disk_kv"] or (Path(values["disk_kv"]).exists() and not Path(values["disk_kv"]).is_dir()):
        raise Unusable(f"--disk-kv {values['disk_kv']!r} is no folder; give one, or one that is to be made")
    if not values["enable_prefix_caching"]:
        raise Unusable(f"--disk-kv {values['disk_kv']} is of no use without prefix caching; leave one of them out")
    if not sizes["host_blocks"]:
        raise Unusable(
            f"--disk-kv {values['disk_kv']}: blocks go to the disk through the host's memory, and --host-kv-gb "
            f"{host_gb:g} holds none; give more, or leave --disk-kv out"
        )
    disk_blocks = int(values["disk_kv_gb"] * GIGABYTE / block_bytes)
    if not disk_blocks:
        raise Unusable(f"--disk-kv-gb {values['disk_kv_gb']:g} holds no block of {block_bytes:,} bytes; give more")
    return sizes | {"disk_kv": values["disk_kv"], "disk_blocks": min(LARGEST, disk_blocks)}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
