"""Folders with no more of a model in them than a configuration needs."""

import json
from pathlib import Path
from typing import Any

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
FP32_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4


def model_folder(folder: Path, **fields: Any) -> str:
    own = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "eos_token_id": [7, 8],
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(own | fields))
    return str(folder)
