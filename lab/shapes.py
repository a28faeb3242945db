"""Well-known models and devices, for questions about what is not at hand.

Models are given as their makers' `config.json` gives them; memory as the makers of devices name it, in 10^9 bytes.
"""

from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from api.settings import Unusable
from replica.model.config import ModelConfig, read_config
from replica.sizing import GIGABYTE

DEVICES_GB = {
    "a10": 24,
    "a100-40": 40,
    "a100-80": 80,
    "b200": 180,
    "h100": 80,
    "h200": 141,
    "l4": 24,
    "l40s": 48,
    "mi300x": 192,
    "rtx3090": 24,
    "rtx4090": 24,
    "rtx5090": 32,
    "t4": 16,
}


class Shape(NamedTuple):
    config: ModelConfig
    nominal_parameters: int  # what its name says; 0: nothing


LLAMA_3_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    dtype="bfloat16",
)


def _shape(nominal_parameters_b: float, **differences: Any) -> Shape:
    """Describe a model by its differences from Llama 3 8B."""
    return Shape(replace(LLAMA_3_8B, **differences), round(nominal_parameters_b * GIGABYTE))


SHAPES = {
    "demo": _shape(
        0,  # its name says nothing
        vocab_size=1259,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        dtype="float32",
    ),
    "llama-3-8b": _shape(8),
    "llama-3-70b": _shape(70, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64),
    "mistral-7b": _shape(
        7,
        architecture="mistral",
        vocab_size=32_768,
        rope_theta=1e6,
        max_position_embeddings=32_768,
    ),
    "qwen2.5-7b": _shape(
        7,
        architecture="qwen2",
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=131_072,
        qkv_bias=True,
    ),
    "qwen3-0.6b": _shape(
        0.6,
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        qk_norm=True,
    ),
}


def shape_of(model: str) -> Shape:
    """Return the shape of a well-known model, or of the one whose config.json or folder is named."""
    if model in SHAPES:
        return SHAPES[model]
    folder = Path(model).parent if Path(model).name == "config.json" else Path(model)
    if not (folder / "config.json").is_file():
        raise Unusable(
            f"{model!r} is neither a folder with a config.json nor one of {', '.join(SHAPES)}; name one of them"
        )
    try:
        return Shape(read_config(folder), 0)
    except (OSError, ValueError) as error:
        raise Unusable(str(error)) from error
