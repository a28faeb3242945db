"""GGUF files made of small models as llama.cpp's converter makes them, with the package that it uses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from replica.model.gguf.folder import write_texts
from tests.replica.models import reference

F32 = GGMLQuantizationType.F32
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_of(
    name: str,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    divisors: "np.ndarray[Any, Any] | None" = None,
    type: GGMLQuantizationType = F32,
) -> Path:
    """One of `tests.replica.models`. Of its metadata some can be changed, or left out by None; divisors are of RoPE."""
    model: Any = reference(name)
    made = model.config
    architecture = {"mistral": "llama"}.get(made.model_type, made.model_type)
    rope = made.rope_parameters
    heads, kv_heads = made.num_attention_heads, made.num_key_value_heads
    head_dim = getattr(made, "head_dim", None) or made.hidden_size // heads
    known = {
        "general.architecture": architecture,
        f"{architecture}.block_count": made.num_hidden_layers,
        f"{architecture}.context_length": made.max_position_embeddings,
        f"{architecture}.embedding_length": made.hidden_size,
        f"{architecture}.feed_forward_length": made.intermediate_size,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(made.rms_norm_eps),
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
    } | byte_tokenizer(made.vocab_size)
    tensors = {}
    for own_name, weight in model.state_dict().items():
        if own_name == "lm_head.weight" and made.tie_word_embeddings:
            continue
        renamed, rows = _renamed(own_name), weight
        if architecture == "llama" and (".attn_q." in renamed or ".attn_k." in renamed):
            rows = _neighbours(weight, heads if ".attn_q." in renamed else kv_heads)
        tensors[renamed] = rows.float().numpy()
    if divisors is not None:
        tensors["rope_freqs.weight"] = divisors
    return write_gguf(folder / f"{name}.gguf", known | dict(changes or {}), tensors, type)


def byte_tokenizer(count: int) -> dict[str, Any]:
    """The tokens that GPT-2 has for bytes, and a merge."""
    tokens = [*sorted(ByteLevel.alphabet()), "ab"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *(f"<{number}>" for number in range(len(tokens), count))],
        "tokenizer.ggml.token_type": [NORMAL] * (count - 1) + [CONTROL],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": count - 1,
    }


def write_gguf(
    file: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, "np.ndarray[Any, Any]"],
    type: GGMLQuantizationType = F32,
) -> Path:
    """Quantize the matrices whose rows can be; a value that is None is left out."""
    writer = GGUFWriter(file, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if value is None or key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {bool: GGUFValueType.BOOL, str: GGUFValueType.STRING, int: GGUFValueType.UINT32}
            writer.add_key_value(key, value, kinds.get(value.__class__, GGUFValueType.FLOAT32))
    for name, values in tensors.items():
        if values.ndim > 1 and values.shape[-1] % GGML_QUANT_SIZES[type][0] == 0:
            writer.add_tensor(name, quantize(values, type), raw_dtype=type)
        else:
            writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def folder_of(file: Path, folder: Path) -> Path:
    """A model's folder, without any cache."""
    folder.mkdir(parents=True)
    write_texts(file, folder)
    (folder / "model.gguf").symlink_to(file)
    return folder


def _renamed(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{GGUF_NAMES[module]}.{kind}"
    layer, part = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def _neighbours(weight: Tensor, heads: int) -> Tensor:
    """Bring the rows that RoPE rotates together next to each other, as `LlamaModel.permute` of the converter does."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> "np.ndarray[Any, Any]":
    """As the converter computes them: by wavelengths."""
    divisors = []
    low, high = (
        rope["original_max_position_embeddings"] / rope[key] for key in ("low_freq_factor", "high_freq_factor")
    )
    for dimension in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (dimension / head_dim)
        smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(rope["factor"])
        else:
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)
