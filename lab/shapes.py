"""Well-known models and devices, for questions about hardware that is not at hand.

Models are given as their makers' `config.json` gives them; memory as the makers of devices name it, in 10^9 bytes.
"""

from pathlib import Path
from typing import Any

from api.process.settings import Unusable
from replica.model.config import ModelConfig, read_config

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
