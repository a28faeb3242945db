"""A LoRA adapter with random weights for any model, in a folder as peft writes it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from replica.lora.files import CONFIG_FILE, WEIGHTS_FILE, shapes_of
from replica.model.config import ModelConfig


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int, spread: float = 0.02) -> Path:
    """It changes every projection."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_layers):
        for part, (inputs, outputs) in shapes_of(config).items():
            inside = "mlp" if part in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                name = f"base_model.model.model.layers.{layer}.{inside}.{part}.lora_{letter}.weight"
                weights[name] = torch.empty(shape).normal_(0, spread, generator=generator)
    save_file(weights, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder
