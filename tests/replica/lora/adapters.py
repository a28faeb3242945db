"""LoRA adapters with random weights for the models of `tests.replica.models`, made by peft."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.replica.models import reference

if TYPE_CHECKING:
    import peft

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Each changes other parts of the model, and is scaled in another way.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "attention": {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 16, "lora_alpha": 8, "target_modules": ["o_proj", "down_proj"], "use_rslora": True},
    "wide": {"r": 100, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"]},
    "some layers": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "layers_to_transform": [1]},
}


@cache
def adapted(model: str, adapter: str) -> "peft.PeftModel":
    """The model with the adapter, as peft computes it."""
    import peft  # it takes seconds, which each test process would need

    torch.manual_seed(sum((model + adapter).encode()))
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **ADAPTERS[adapter])
    made = peft.get_peft_model(deepcopy(reference(model)), config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn_like(weight) * 0.15)
    made.eval()
    return made


def saved_adapter(model: str, adapter: str, folder: Path) -> Path:
    """The adapter in a folder of its own."""
    made = folder / f"{model} {adapter}"
    if not made.is_dir():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted(model, adapter).save_pretrained(str(made))
    return made


@torch.no_grad()
def adapted_logits(model: str, adapter: str, token_ids: Sequence[int]) -> Tensor:
    """The logits of peft after each of these tokens."""
    said: Tensor = adapted(model, adapter)(torch.tensor([list(token_ids)])).logits[0]
    return said.float()
