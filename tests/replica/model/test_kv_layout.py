from pathlib import Path
from typing import Any

import msgspec
import pytest

from replica.model.config import Llama3Scaling, ModelConfig, read_config
from replica.model.demo import TEXTS
from replica.model.weights_digest import kv_layout

CONFIG = read_config(TEXTS)
SCALING = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "model": "demo", "arrangement": "cpu"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WARMROUTE_CACHE_DIR", str(tmp_path / "cache"))
    return weights(tmp_path / "model", b"weights")


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


def layout(folder: Path, config: ModelConfig = CONFIG, **changes: Any) -> str:
    return kv_layout(config, folder=folder, **(SETTINGS | changes))


def test_the_same_model_has_the_same_layout_on_another_machine(folder: Path, tmp_path: Path) -> None:
    name = layout(folder)
    assert len(name) == 32 and int(name, 16)
    assert layout(weights(tmp_path / "elsewhere", b"weights")) == name


@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"block_size": 32}, {"model": "another"}, {"arrangement": "cuda"}]
)
def test_a_setting_that_changes_a_block_changes_the_layout(folder: Path, changes: dict[str, Any]) -> None:
    assert layout(folder, **changes) != layout(folder)


@pytest.mark.parametrize(
    "changes",
    [{"num_layers": 9}, {"num_kv_heads": 9}, {"head_dim": 10}, {"rope_theta": 5.0}, {"rope_scaling": SCALING}],
)
def test_a_config_that_changes_a_block_changes_the_layout(folder: Path, changes: dict[str, Any]) -> None:
    assert layout(folder, msgspec.structs.replace(CONFIG, **changes)) != layout(folder)


def test_other_weights_change_the_layout(folder: Path, tmp_path: Path) -> None:
    assert layout(weights(tmp_path / "tuned", b"Weights")) != layout(folder)
