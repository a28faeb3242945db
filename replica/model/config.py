"""A model's `config.json`, spelled as transformers 5 does or as it did before; models that cannot run are refused.

Where a key may be absent, the default is the one that transformers gives to that architecture.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from xxhash import xxh3_128_hexdigest

from api.model_files import read_object

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
KV_HEADS_IF_ABSENT = {"mistral": 8, "qwen2": 32, "qwen3": 32}
SLIDING_WINDOW_IF_ABSENT = 4096
MAX_WINDOW_LAYERS_IF_ABSENT = 28
HEAD_DIM_IF_ABSENT = {"qwen3": 128}
LARGEST_SIZE = 2**31 - 1
LARGEST_NUMBER = sys.float_info.max
QUOTED_AT_MOST = 200  # characters of a value in an error
NAMED_AT_MOST = 8  # names
LAYOUT_VERSION = 2  # raise it when the same weights and tokens give other bytes of a block


class Llama3Scaling(Struct, frozen=True, kw_only=True):
    """Llama 3.1's stretching of RoPE's slow rotations to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The shapes of one model, and what distinguishes its architecture from Llama's."""

    architecture: str  # llama, mistral, qwen2 or qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # o_proj has one
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # the weights' type by the config: float32, bfloat16 or float16

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    @property
    def parameters(self) -> int:
        """The number of parameters; tied embeddings count once."""
        width, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        embeddings = self.vocab_size * width * (1 if self.tie_word_embeddings else 2)
        attention = width * (queries + 2 * keys) + queries * width
        attention += self.qkv_bias * (queries + 2 * keys) + self.output_bias * width + self.qk_norm * 2 * self.head_dim
        mlp = 3 * width * inner + self.mlp_bias * (2 * inner + width)
        return embeddings + self.num_layers * (attention + mlp + 2 * width) + width


def kv_layout(
    config: ModelConfig, *, dtype: str, block_size: int, model: str, weights_digest: str, arrangement: str
) -> str:
    """32 hexadecimal digits that are equal only if a block's key and bytes mean the same, on any machine.

    `model` is the name in block keys, and `arrangement` names the order of a block's bytes.
    """
    parts = (LAYOUT_VERSION, model, dtype, block_size, arrangement, config, weights_digest)
    return xxh3_128_hexdigest(msgspec.json.encode(parts))


def read_config(folder: Path) -> ModelConfig:
    """The `config.json` of a model's folder. ValueError for one that does not run here, with the reason."""
    file = folder / "config.json"
    try:
        fields = read_object(file)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no config.json; name the folder of a model in Hugging Face's layout") from error
    return parse_config(fields, str(file))


def parse_config(fields: Mapping[str, Any], name: str) -> ModelConfig:
    """The same of fields that were read already; `name` is what errors call them."""
    architecture = _architecture(fields, name)
    _refuse_missing(fields, REQUIRED, name)
    config = _Fields(fields, name)
    _refuse_what_is_not_built(config)
    _refuse_windows(config, architecture)
    heads = config.size("num_attention_heads")
    absent = KV_HEADS_IF_ABSENT.get(architecture, heads)
    kv_heads = config.size("num_key_value_heads", heads if "num_key_value_heads" in fields else absent)
    if heads % kv_heads:
        raise config.refused("num_key_value_heads", kv_heads, f"it must divide num_attention_heads, which is {heads}")
    if config.get("head_dim") is None and architecture not in HEAD_DIM_IF_ABSENT:
        head_dim, missing = divmod(hidden := config.size("hidden_size"), heads)
        if missing:
            why = f"num_attention_heads, which is {heads}, must divide it where head_dim is not given"
            raise config.refused("hidden_size", hidden, why)
    else:
        head_dim = config.size("head_dim", HEAD_DIM_IF_ABSENT.get(architecture))
    if head_dim % 2:
        raise config.refused("head_dim", head_dim, "it must be even, because RoPE rotates pairs")
    rope = _rope(config)
    of_dtype = "dtype" if config.get("dtype") is not None else "torch_dtype"
    dtype = config.get(of_dtype)
    dtype = "float32" if dtype is None else dtype  # torch's own default, which transformers leaves out
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise config.refused(of_dtype, dtype, f"what works: {', '.join(DTYPE_BYTES)}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", config.number("rope_theta", 10_000.0)),
        rope_scaling=_scaling(rope),
        max_position_embeddings=config.size("max_position_embeddings", least=2),  # a prompt and an answer
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        # The others of the four ignore these keys, whatever they say.
        qkv_bias=architecture == "qwen2" or (architecture != "mistral" and config.flag("attention_bias")),
        output_bias=architecture in ("llama", "qwen3") and config.flag("attention_bias"),
        mlp_bias=architecture == "llama" and config.flag("mlp_bias"),
        qk_norm=architecture == "qwen3",
        dtype=dtype,
    )


class _Fields:
    """One JSON object, read with complaints that quote the value and say where it stands."""

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        self.fields = fields
        self.name = name

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(key, default)

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST_SIZE:
            raise self.refused(key, value, f"it must be a whole number from {least} to {LARGEST_SIZE}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LARGEST_NUMBER:
            raise self.refused(key, value, "it must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.refused(key, value, "it must be true or false")
        return bool(value)

    def refused(self, key: str, value: object, why: str) -> ValueError:
        return ValueError(f"{self.name}: {key} is {quoted(value)}; {why}")


def quoted(value: object) -> str:
    """On one line and without control codes, whatever the file holds."""
    text = json.dumps(value)
    return text if len(text) <= QUOTED_AT_MOST else text[:QUOTED_AT_MOST] + "..."


def some(names: Sequence[str]) -> str:
    """The first of these names, in an error."""
    return ", ".join(names[:NAMED_AT_MOST]) + (", ..." if len(names) > NAMED_AT_MOST else "")


def _architecture(fields: Mapping[str, Any], name: str) -> str:
    """By `architectures`, or where that is absent (a config saved without its model) by `model_type`."""
    named = fields.get("architectures") or [None]
    found = named[0] if isinstance(named, list) else named
    model_type = fields.get("model_type")
    if found is None and model_type in ARCHITECTURES.values():
        return str(model_type)
    if isinstance(found, str) and found in ARCHITECTURES:
        return ARCHITECTURES[found]
    what = f"architecture {quoted(found)}" if found is not None else f"model_type {quoted(model_type)}"
    raise ValueError(f"{name}: the {what} is not supported; what works: {', '.join(ARCHITECTURES)}")


def _refuse_missing(fields: Mapping[str, Any], keys: tuple[str, ...], name: str) -> None:
    missing = [key for key in keys if fields.get(key) is None]
    if missing:
        raise ValueError(f"{name} has no {', '.join(missing)}; it is not the whole config of a model")


def _refuse_what_is_not_built(config: _Fields) -> None:
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"{config.name}: the weights are quantized ({quoted(method)}), which is not supported; "
            "use the checkpoint in bfloat16, float16 or float32"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise config.refused("hidden_act", activation, 'only "silu" is supported')
    if (rotated := config.get("partial_rotary_factor", 1)) not in (1, None):
        raise config.refused("partial_rotary_factor", rotated, "only 1 (heads rotated whole) is supported")


def _refuse_windows(config: _Fields, architecture: str) -> None:
    """Refuse windows that a text can outgrow, in the layers that transformers gives them to."""
    advice = "sliding windows are not supported; use a model with full attention in every layer"
    layers = config.get("layer_types")
    if layers is not None and not (isinstance(layers, list) and all(isinstance(layer, str) for layer in layers)):
        raise config.refused("layer_types", layers, "it must be a list of names, one for each layer")
    # Mistral has a window unless it is null, a Qwen only if it says so as well, and a Llama none.
    asked = config.flag("use_sliding_window") if architecture.startswith("qwen") else architecture == "mistral"
    window = None
    if asked and config.get("sliding_window", SLIDING_WINDOW_IF_ABSENT) is not None:
        window = config.size("sliding_window", SLIDING_WINDOW_IF_ABSENT)
    longest = config.size("max_position_embeddings")
    outgrown = window is not None and window < longest
    others = sorted(set(layers or ()) - {"full_attention"})
    if others and (window is None or outgrown or others != ["sliding_attention"]):
        raise config.refused("layer_types", others, advice)
    if architecture == "mistral" and outgrown:
        raise config.refused("sliding_window", window, f"that is less than the {longest} positions, and {advice}")
    full_layers = config.size("max_window_layers", MAX_WINDOW_LAYERS_IF_ABSENT, least=0)  # the first ones
    if outgrown and not layers and full_layers < config.size("num_hidden_layers"):
        raise config.refused("use_sliding_window", True, advice)


def _rope(config: _Fields) -> _Fields:
    """`rope_parameters` of transformers 5, which hold theta too; before, `rope_scaling` did not."""
    for key in ("rope_parameters", "rope_scaling"):
        if (found := config.get(key)) is not None:
            if not isinstance(found, dict):
                raise config.refused(key, found, "it must be an object or null")
            rope = _Fields(found, f"{config.name}: {key}")
            _refuse_what_is_not_built(rope)  # a partial rotary factor may stand here
            return rope
    return _Fields({}, config.name)


def _scaling(rope: _Fields) -> Llama3Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        if nested := [key for key, value in rope.fields.items() if isinstance(value, dict)]:
            raise ValueError(f"{rope.name} differs between layers ({quoted(nested)}), which is not supported")
        return None
    if kind != "llama3":
        raise rope.refused("rope_type", kind, 'only "default" and "llama3" are supported')
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    _refuse_missing(rope.fields, keys, rope.name)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.refused("high_freq_factor", high, f"it must be above low_freq_factor, which is {low:g}")
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.size("original_max_position_embeddings"),
    )
