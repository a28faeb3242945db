"""A folder in the user's cache that makes a GGUF file a model in Hugging Face's layout, by the file's metadata."""

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from replica.model.config import parse_config
from replica.model.demo import cache_folder, made_once
from replica.model.gguf.header import F32, Header, Tensor, read_header
from replica.model.gguf.tokenizer import TOKENS, build_tokenizer, tokenizer_config

VERSION = 1  # raise it when the texts that are made of the same file change
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = {F32: "float32", 1: "float16", 30: "bfloat16"}  # types by ggml's numbers; others are quantized
PROCESSORS = Path("/proc/cpuinfo")
ELSEWHERE = "run it in vLLM and put the router in front"
ENDS = ("eos", "eot", "eom")  # the ends of a text, a turn, a message
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# How Llama 3.1 to 3.3 stretch RoPE, whose divisors a GGUF holds instead.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_POSITIONS = 1.0, 4.0, 8192
MAX_DIVISORS, MAX_FACTOR = 4096, 2.0**20


def gguf_folder(file: Path) -> Path:
    """Its texts and a link to it, made once for each state of the file. ValueError for a file that cannot run here."""
    whole, found = file.resolve(), file.stat()
    state = xxh3_64_hexdigest(os.fsencode(f"{VERSION} {found.st_size} {found.st_mtime_ns} {whole}"))

    def make(folder: Path) -> None:
        write_texts(whole, folder)
        (folder / "model.gguf").symlink_to(whole)

    folder = cache_folder() / "gguf" / f"{file.stem[:100]}-{state}"
    return made_once(folder, make, f"the tokenizer of {file}")


def write_texts(file: Path, folder: Path) -> None:
    """Write config.json, tokenizer.json, tokenizer_config.json, and generation_config.json if the file has defaults.

    ValueError, on one line, for a file that is damaged or cannot run here.
    """
    header = read_header(file)
    texts = {"config.json": _config(header), "tokenizer_config.json": tokenizer_config(header)}
    sampling = {name: header.scalar(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    if sampling := {name: value for name, value in sampling.items() if value is not None}:
        texts["generation_config.json"] = {"do_sample": True} | sampling
    tokenizer = build_tokenizer(header)
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")


def _config(header: Header) -> dict[str, Any]:
    architecture = header.scalar("general.architecture")
    if architecture not in ARCHITECTURES:
        what = f"the architecture {architecture!r:.80} is not supported, only {', '.join(ARCHITECTURES)}"
        raise header.refused(f"{what}; {ELSEWHERE}")

    def value(key: str) -> Any:
        return header.scalar(f"{architecture}.{key}")

    embeddings, query = header.tensors.get("token_embd.weight"), header.tensors.get("blk.0.attn_q.weight")
    if embeddings is None or query is None:
        raise header.refused("it has no embeddings or no layers; name the file of a whole model, in one part")
    head_dim = value("attention.key_length") or value("rope.dimension_count")
    kv_heads = value("attention.head_count_kv")
    ends = [header.scalar(f"tokenizer.ggml.{end}_token_id") for end in ENDS]
    rope: dict[str, Any] = {"rope_theta": value("rope.freq_base")}
    config = {
        "architectures": [ARCHITECTURES[str(architecture)]],
        "model_type": architecture,
        "vocab_size": embeddings.shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count") if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "bos_token_id": header.scalar("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "dtype": DTYPES.get(query.type) or _quickest(),
    }
    parsed = parse_config(config, str(header.file))  # it refuses what cannot run
    if (count := len(header.strings(TOKENS))) > parsed.vocab_size:
        raise header.refused(f"it has {count} tokens and only {parsed.vocab_size} embeddings; get the file again")
    for key, supported in {
        "expert_count": 0,
        "attention.sliding_window": 0,
        "attention.value_length": parsed.head_dim,
        "rope.dimension_count": parsed.head_dim,
        "rope.scaling.type": "none",
        "rope.scale_linear": 1,
    }.items():
        if value(key) not in (None, supported):
            raise header.refused(f"{architecture}.{key} is {value(key)!r:.80}, which is not supported; {ELSEWHERE}")
    if (divisors := header.tensors.get("rope_freqs.weight")) is not None:
        rope |= _llama3_scaling(header, divisors, parsed.head_dim // 2, parsed.rope_theta)
    return config


def _quickest() -> str:
    """bfloat16, where the processor multiplies it: elsewhere it takes several times as long as float32."""
    try:
        return "bfloat16" if "avx512_bf16" in PROCESSORS.read_text(encoding="utf-8") else "float32"
    except OSError:  # not on Linux
        return "float32"


def _llama3_scaling(header: Header, tensor: Tensor, count: int, theta: float) -> dict[str, Any]:
    if tensor.type != F32 or tensor.shape != (count,) or count > MAX_DIVISORS:
        raise header.refused(f"rope_freqs.weight has the type {tensor.type} and the shape {tensor.shape}; {ELSEWHERE}")
    with header.file.open("rb") as opened:
        opened.seek(tensor.start)
        divisors = struct.unpack(f"<{count}f", opened.read(4 * count).ljust(4 * count, b"\0"))
    factor = min(max(*divisors, 1.0), MAX_FACTOR)
    rotations = [ORIGINAL_POSITIONS * theta ** (-i / len(divisors)) / math.tau for i in range(len(divisors))]
    shares = [(r - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR) for r in rotations]
    kept = [min(max(share, 0.0), 1.0) for share in shares]
    expected = [1 / ((1 - share) / factor + share) for share in kept]
    if not all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(divisors, expected, strict=True)):
        raise header.refused(f"rope_freqs.weight stretches RoPE in another way than Llama 3.1 does; {ELSEWHERE}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_POSITIONS,
    }
