"""An adapter's folder as peft writes it: `adapter_config.json` and `adapter_model.safetensors`.

What would be computed wrongly is refused: another kind of adapter, and weights of other parts of the model.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct
from safetensors.torch import load
from torch import Tensor
from xxhash import xxh3_128

from api.model_files import read_bytes_of, read_object
from replica.model.config import ModelConfig, quoted, some

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 1024
MAX_HEADER_BYTES = 2**20
# The layer's part as transformers names it; peft puts base_model.model before the model's own names.
NAME = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight"
)


class Factors(NamedTuple):
    """The change of one matrix: up @ down, the adapter's scale included."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]


class AdapterFiles(NamedTuple):
    digest: str  # the digest of everything that changes results
    factors: dict[tuple[int, str], Factors]  # factors by layer and projection

    @property
    def rank(self) -> int:
        return max(len(factors.down) for factors in self.factors.values())


Rank: TypeAlias = Annotated[int, Meta(ge=1, le=2**20)]
# Ways to begin a training that leave the model's own weights as they are; others change them.
BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
# Fields that change results, each in a way of its own.
UNSUPPORTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)


class _Config(Struct, frozen=True):
    """The part of peft's LoraConfig that changes what is computed."""

    peft_type: str
    r: Rank
    lora_alpha: float
    init_lora_weights: bool | str = True
    use_rslora: bool = False
    bias: str = "none"


def read_adapter(folder: Path, model: ModelConfig) -> AdapterFiles:
    """Read it whole; ValueError or OSError, with the file's name, if it does not fit the model."""
    weights_file = folder / WEIGHTS_FILE
    config = _read_config(folder / CONFIG_FILE)
    largest = model.num_layers * MAX_RANK * sum(inputs + outputs for inputs, outputs in shapes_of(model).values())
    try:
        weights = read_bytes_of(weights_file, 4 * largest + MAX_HEADER_BYTES)
    except FileNotFoundError as error:
        if weights_file.exists():
            raise ValueError(str(error)) from error
        others = some(sorted(path.name for path in folder.glob("adapter_model.*")))
        why = f"it has {others}: convert it to safetensors" if others else "get the weights too"
        raise ValueError(f"{folder} has no {WEIGHTS_FILE}; {why}") from error
    digest = xxh3_128(msgspec.json.encode(config))
    digest.update(weights)
    try:
        tensors = load(weights)
    except MemoryError:
        raise
    except Exception as error:  # safetensors' own, or torch's about types and shapes
        raise ValueError(f"{weights_file} is not a whole safetensors file: {error}; get it again") from error
    return AdapterFiles(digest.hexdigest(), _paired(tensors, config, model, weights_file))


def _read_config(file: Path) -> _Config:
    try:
        fields = read_object(file)
    except FileNotFoundError as error:
        raise ValueError(
            f"{file.parent} has no {file.name}; give the folder of an adapter, as peft saves it"
        ) from error
    try:
        config = msgspec.convert({name: value for name, value in fields.items() if value is not None}, _Config)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file} is not the configuration of a LoRA adapter: {error}") from error
    _refuse(file, "peft_type", config.peft_type, config.peft_type == "LORA")
    _refuse(file, "bias", config.bias, config.bias == "none")
    _refuse(file, "init_lora_weights", config.init_lora_weights, config.init_lora_weights in BEGINNINGS)
    for key in UNSUPPORTED:
        _refuse(file, key, fields.get(key), not fields.get(key))
    return config


def _refuse(file: Path, key: str, value: object, fits: bool) -> None:
    if not fits:
        what = f"{key} is {quoted(value)}, which is not supported"
        raise ValueError(f"{file}: {what}; what works: plain LoRA of linear layers")


def _paired(
    tensors: Mapping[str, Tensor], config: _Config, model: ModelConfig, file: Path
) -> dict[tuple[int, str], Factors]:
    shapes = shapes_of(model)
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    foreign = []
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if match is None or match[2] not in shapes or int(match[1]) >= model.num_layers:
            foreign.append(name)
        else:
            found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    if foreign:
        raise ValueError(
            f"{file} has weights that this model has no place for: {some(sorted(foreign))}; adapters of "
            f"{', '.join(shapes)} in {model.num_layers} layers work"
        )
    if not found:
        raise ValueError(f"{file} has no weights")
    factors, rank = {}, config.r
    for (layer, part), pair in sorted(found.items()):
        what = f"{file}: {part} of layer {layer}"
        if pair.keys() != {"A", "B"}:
            raise ValueError(f"{what} has only lora_{''.join(pair)}; get the file again")
        if rank > MAX_RANK:
            raise ValueError(f"{what} has rank {rank}; at most {MAX_RANK} is supported")
        down, up, (inputs, outputs) = pair["A"], pair["B"], shapes[part]
        for tensor, expected in ((down, (rank, inputs)), (up, (outputs, rank))):
            if tuple(tensor.shape) != expected:
                given = f"a tensor of {tuple(tensor.shape)}"
                raise ValueError(f"{what} has {given}; the model and {CONFIG_FILE} ask for {expected}")
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise ValueError(f"{what} is of {tensor.dtype}; quantized adapters are not supported")
        scale = config.lora_alpha / (math.sqrt(rank) if config.use_rslora else rank)
        factors[layer, part] = Factors(down, up.float() * scale)
    return factors


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of each projection of a layer."""
    width, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q_proj": (width, queries),
        "k_proj": (width, keys),
        "v_proj": (width, keys),
        "o_proj": (queries, width),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }
