from typing import Any

import msgspec
import pytest

from replica.model.config import Llama3Scaling, ModelConfig, kv_layout, read_config
from replica.model.demo import TEXTS

CONFIG = read_config(TEXTS)
SCALING = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "model": "demo",
    "weights_digest": "digest",
    "arrangement": "cpu",
}


def layout(config: ModelConfig = CONFIG, **changes: Any) -> str:
    return kv_layout(config, **(SETTINGS | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"model": "another"},
        {"weights_digest": "other"},
        {"arrangement": "cuda"},
    ],
)
def test_a_setting_that_changes_a_block_changes_the_layout(changes: dict[str, Any]) -> None:
    assert len(layout()) == 32 and layout() == layout(CONFIG, **SETTINGS)
    assert layout(**changes) != layout()


@pytest.mark.parametrize(
    "changes",
    [{"num_layers": 9}, {"num_kv_heads": 9}, {"head_dim": 10}, {"rope_theta": 5.0}, {"rope_scaling": SCALING}],
)
def test_a_config_that_changes_a_block_changes_the_layout(changes: dict[str, Any]) -> None:
    assert layout(msgspec.structs.replace(CONFIG, **changes)) != layout()
