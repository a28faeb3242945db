"""The well-known shapes match their models."""

import pytest

from lab.size import CONFIGS
from replica.model.sizing import kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "parameters"),  # as their makers count them
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_a_shape_has_the_parameters_of_its_model(name: str, parameters: int) -> None:
    assert CONFIGS[name].parameters == parameters


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_formula_agrees_with_the_model(name: str, dtype: str) -> None:
    config = CONFIGS[name]
    size = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    assert size == config.kv_bytes_per_token(dtype)
