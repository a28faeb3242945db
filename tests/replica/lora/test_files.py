"""Folders that hold no adapter of the model are refused in one line that says why."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replica.lora.files import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from replica.model.config import read_config
from tests.replica.lora.adapters import saved_adapter
from tests.replica.models import saved

MODEL = "qwen3"
LAYER = "base_model.model.model.layers.0.self_attn"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def adapter(models: Path, tmp_path: Path) -> Path:
    """A folder of its own, to be spoiled."""
    return Path(shutil.copytree(saved_adapter(MODEL, "attention", models), tmp_path / "adapter"))


def configured(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / CONFIG_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def weighed(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS_FILE)
        change(weights)
        save_file(weights, folder / WEIGHTS_FILE)

    return spoil


def cut(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-40])


def pickled(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")


def odd_type(folder: Path) -> None:
    """Give a tensor a type that safetensors knows and torch does not."""
    header = json.dumps(
        {f"{LAYER}.q_proj.lora_A.weight": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    ).encode()
    (folder / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")


def fifo(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    os.mkfifo(folder / WEIGHTS_FILE)


def endless(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to("/dev/zero")


def too_large(folder: Path) -> None:
    os.truncate(folder / WEIGHTS_FILE, 2**40)


SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / CONFIG_FILE).unlink(), "no adapter_config.json; "),
    (lambda folder: (folder / CONFIG_FILE).write_text("["), "is not JSON"),
    (lambda folder: (folder / CONFIG_FILE).write_text("{}"), "is not the configuration of a LoRA adapter"),
    (lambda folder: (folder / WEIGHTS_FILE).unlink(), "no adapter_model.safetensors; get the weights too"),
    (pickled, "it has adapter_model.bin: convert it to safetensors"),
    (cut, "not a whole safetensors file"),
    (configured(peft_type="LOHA"), 'peft_type is "LOHA"'),
    (configured(use_dora=True), "use_dora is true"),
    (configured(bias="all"), 'bias is "all"'),
    (configured(modules_to_save=["lm_head"]), 'modules_to_save is ["lm_head"]'),
    (configured(r=0), "$.r"),
    (configured(r=10**400), "is not the configuration"),
    (configured(init_lora_weights="pissa_niter_4"), 'init_lora_weights is "pissa_niter_4"'),
    (configured(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens is [1, 2]"),
    (configured(layer_replication=[[0, 2]]), "layer_replication is [[0, 2]]"),
    (configured(r=2000), "has rank 2000"),
    (configured(r=4), "has a tensor of (3, 64)"),
    (configured(rank_pattern={"q_proj": 3}), 'rank_pattern is {"q_proj": 3}, which is not supported'),
    (odd_type, "not a whole safetensors file"),
    (fifo, "is not a regular file"),
    (endless, "is not a regular file"),
    (too_large, "at most"),
    (weighed(lambda weights: weights.clear()), "has no weights"),
    (weighed(lambda weights: weights.pop(f"{LAYER}.q_proj.lora_B.weight")), "q_proj of layer 0 has only lora_A"),
    (
        weighed(lambda weights: weights.update({f"{LAYER}.q_proj.lora_A.weight": torch.ones(3, 7)})),
        "has a tensor of (3, 7); the model and adapter_config.json ask for (3, 64)",
    ),
    (
        weighed(lambda weights: weights.update({f"{LAYER}.q_proj.lora_A.weight": torch.ones(3, 64, dtype=torch.int8)})),
        "quantized adapters are not supported",
    ),
    (
        weighed(lambda weights: weights.update({"base_model.model.lm_head.lora_A.weight": torch.ones(3, 64)})),
        "no place for: base_model.model.lm_head.lora_A.weight",
    ),
    (
        weighed(lambda weights: weights.update({LAYER.replace(".0.", ".9.") + ".q_proj.lora_A.weight": torch.ones(1)})),
        "no place for: base_model.model.model.layers.9",
    ),
]


@pytest.mark.parametrize(("spoil", "said"), SPOILT, ids=[said for _, said in SPOILT])
def test_what_is_no_adapter_of_the_model_is_refused(
    spoil: Callable[[Path], object], said: str, adapter: Path, models: Path
) -> None:
    config = read_config(saved(MODEL, models))
    read_adapter(adapter, config)
    spoil(adapter)
    with pytest.raises(ValueError) as refused:
        read_adapter(adapter, config)
    assert said in str(refused.value)
    assert str(adapter) in str(refused.value)


def test_its_digest_is_of_all_that_decides_what_is_computed(adapter: Path, models: Path) -> None:
    config = read_config(saved(MODEL, models))
    digests = [read_adapter(adapter, config).digest]
    configured(base_model_name_or_path="elsewhere")(adapter)
    assert read_adapter(adapter, config).digest == digests[0]
    configured(lora_alpha=13)(adapter)
    digests.append(read_adapter(adapter, config).digest)
    weighed(lambda weights: weights[f"{LAYER}.q_proj.lora_A.weight"].add_(1))(adapter)
    digests.append(read_adapter(adapter, config).digest)
    assert len(set(digests)) == 3
