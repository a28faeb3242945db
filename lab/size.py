"""The KV cache that fits beside a model on a device, by the formula of `replica.model.sizing`.

Well-known models are given as their makers' `config.json` gives them.
"""

from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from api.process.settings import Unusable
from replica.model.config import ModelConfig, read_config
from replica.model.sizing import DTYPE_BYTES, GIGABYTE, blocks_in, kv_bytes_per_token, kv_memory, requests_in

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
LLAMA = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
    **dict.fromkeys(("tie_word_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"), False),
}
MISTRAL = {"rope_theta": 1e6, "max_position_embeddings": 32_768}
QWEN = {"rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN_2 = {**QWEN, "max_position_embeddings": 131_072, "qkv_bias": True}
QWEN_3 = {**QWEN, "max_position_embeddings": 40_960, "tie_word_embeddings": True, "qk_norm": True}


def _config(architecture: str, *sizes: int, **differences: Any) -> ModelConfig:
    """Describe a model by its SIZES, and its differences from Llama 3."""
    settings: dict[str, Any] = {**LLAMA, **dict(zip(SIZES, sizes, strict=True)), **differences}
    return ModelConfig(architecture=architecture, **settings)


CONFIGS = {
    "demo": _config("llama", 1259, 256, 512, 4, 8, 4, 32, rms_norm_eps=1e-6, rope_theta=1e4, dtype="float32"),
    "llama-3-8b": _config("llama", 128_256, 4096, 14_336, 32, 32, 8, 128),
    "llama-3-70b": _config("llama", 128_256, 8192, 28_672, 80, 64, 8, 128),
    "mistral-7b": _config("mistral", 32_768, 4096, 14_336, 32, 32, 8, 128, **MISTRAL),
    "qwen2.5-7b": _config("qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128, **QWEN_2),
    "qwen3-0.6b": _config("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, **QWEN_3),
}


def config_of(model: str) -> ModelConfig:
    """Return the configuration of a well-known model, or of the one whose config.json or folder is named."""
    if model in CONFIGS:
        return CONFIGS[model]
    folder = Path(model).parent if Path(model).name == "config.json" else Path(model)
    if not (folder / "config.json").is_file():
        raise Unusable(
            f"{model!r} is neither a folder with a config.json nor one of {', '.join(CONFIGS)}; name one of them"
        )
    try:
        return read_config(folder)
    except (OSError, ValueError) as error:
        raise Unusable(str(error)) from error


# ---- what fits

MEGABYTE = 10**6
REQUEST_TOKENS = (2048, 8192)  # and the model's longest


class Room(NamedTuple):
    """The memory of one device: all of it, or what KV has of it (then the rest does not count)."""

    memory: float | None = None
    kv: float | None = None
    utilization: float = 0.9
    weights: float | None = None  # None: of the model's parameters
    workspace: float = 0.0


class Format(NamedTuple):
    weights: str
    kv: str
    block_size: int = 16
    devices: int = 1


class Fitting(Struct, frozen=True):
    """The number of requests of one length that fit at once, without shared prefixes."""

    tokens: int
    requests: int


class Size(Struct, frozen=True, kw_only=True):
    """Everything is of one device; with several, each holds its share of every token."""

    model: str
    parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_block: int
    block_size: int
    kv_bytes: int
    blocks: int
    tokens: int
    fitting: list[Fitting]


class DoesNotFit(Exception):
    """Says how much is missing."""


def size_of(name: str, config: ModelConfig, room: Room, form: Format) -> Size:
    """DoesNotFit where there is not even room for a block; Unusable for heads that cannot be shared out."""
    heads = config.num_kv_heads
    if heads % form.devices and form.devices % heads:
        raise Unusable(f"--tensor-parallel {form.devices} does not divide the {heads} KV heads; give one that does")
    # Several devices hold the same head if there are more devices than heads.
    per_token = kv_bytes_per_token(config.num_layers, max(1, heads // form.devices), config.head_dim, form.kv)
    per_block = per_token * form.block_size
    whole = config.parameters * DTYPE_BYTES[form.weights] if room.weights is None else room.weights
    weights, kv = whole / form.devices, room.kv
    if kv is None:
        assert room.memory is not None, "either is given"
        kv = kv_memory(room.memory, room.utilization, weights, room.workspace)
    blocks = blocks_in(kv, form.block_size, per_token)
    if not blocks and room.memory is None:
        raise DoesNotFit(f"{kv / MEGABYTE:,.2f} MB for KV hold no block of {per_block / MEGABYTE:,.2f} MB")
    if not blocks and room.memory is not None:
        usable = room.memory * room.utilization
        workspace = f", a workspace of {gigabytes(room.workspace)}" if room.workspace else ""
        raise DoesNotFit(
            f"weights of {gigabytes(weights)}{workspace} and one block of KV do not fit into {gigabytes(usable)} "
            f"({room.memory / GIGABYTE:g} GB x {room.utilization:g}): "
            f"{gigabytes(weights + room.workspace + per_block - usable)} are missing"
        )
    lengths = sorted({length for length in REQUEST_TOKENS if length < config.max_position_embeddings})
    return Size(
        model=name,
        parameters=config.parameters,
        weights_bytes=round(weights),
        kv_bytes_per_token=per_token,
        kv_bytes_per_block=per_block,
        block_size=form.block_size,
        kv_bytes=round(kv),
        blocks=blocks,
        tokens=blocks * form.block_size,
        fitting=[
            Fitting(length, requests_in(blocks, form.block_size, length))
            for length in (*lengths, config.max_position_embeddings)
        ],
    )


def gigabytes(size: float) -> str:
    return f"{size / GIGABYTE:,.2f} GB"
