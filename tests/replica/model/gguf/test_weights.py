"""A GGUF's weights are the model's: it answers as transformers does with the weights that the file was made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from replica.model.weights import Weights
from tests.replica.model.gguf.files import F32, folder_of, gguf_of, write_gguf
from tests.replica.models import ask, native
from tests.replica.test_golden import assert_is_transformers, prompts

QUANTIZED = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
)
ROWS, COLUMNS = 6, 512


@pytest.mark.parametrize("name", ["llama", "llama-biased", "llama-odd", "mistral", "qwen2", "qwen3"])
def test_a_model_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    engine = native(folder_of(gguf_of(name, tmp_path), tmp_path / "folder"))
    asked = prompts([1, 16, 50])
    for prompt, answer in zip(asked, ask(engine, asked), strict=True):
        assert_is_transformers(name, prompt, answer)


@pytest.mark.parametrize("type", [*QUANTIZED, Type.F16, Type.BF16, F32], ids=lambda type: type.name)
def test_each_quantization_is_read(type: Type, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    chance = np.random.default_rng(1)
    block, size = GGML_QUANT_SIZES[type]
    # Below 0x3c every two bytes are a half-precision number, whatever part of a block they are.
    stored = chance.integers(0, 0x3C, (ROWS, COLUMNS // block * size), np.uint8)
    write_raw(file, stored, type)
    expected = torch.from_numpy(dequantize(stored, type).copy()).reshape(ROWS, COLUMNS)
    weights = Weights(tmp_path, torch.float32)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(weights.take(name, ROWS, COLUMNS), expected)
    weights.finish()


def write_raw(file: Path, stored: "np.ndarray[Any, Any]", type: Type) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(file, "qwen2")
    kept = {Type.F32: np.float32, Type.F16: np.float16}.get(type)
    writer.add_tensor("blk.0.ffn_down.weight", stored if kept is None else stored.view(kept), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_of_nobody_are_named_and_rope_divisors_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"blk.0.strange.weight": np.zeros(4), "rope_freqs.weight": np.ones(4), "output_norm.weight": np.ones(4)}
    write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, tensors)
    weights = Weights(tmp_path, torch.float32)
    assert torch.equal(weights.take("model.norm.weight", 4), torch.ones(4))
    weights.finish()
    assert "1 tensors are not part of the model and stay unused: blk.0.strange.weight" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "shape", "words"),
    [
        ({}, (8, 32), "'blk.0.attn_q.weight' has 8 rows, which 0 heads cannot have"),
        ({"llama.attention.head_count": 3}, (8, 32), "has 8 rows, which 3 heads cannot have"),
        ({"llama.attention.head_count": 2**31}, (8, 32), "has 8 rows, which 2147483648 heads cannot have"),
    ],
    ids=str,
)
def test_heads_that_do_not_fit_are_refused(
    metadata: dict[str, Any], shape: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    write_gguf(
        tmp_path / "model.gguf", {"general.architecture": "llama"} | metadata, {"blk.0.attn_q.weight": np.ones(shape)}
    )
    with pytest.raises(ValueError, match=words):
        Weights(tmp_path, torch.float32)


@pytest.mark.parametrize("type", [Type.I8, Type.Q8_K, Type.F64])
def test_what_cannot_be_dequantized_is_named(type: Type, tmp_path: Path) -> None:
    block, size = GGML_QUANT_SIZES[type]
    write_raw(tmp_path / "model.gguf", np.zeros((2, 512 // block * size), np.uint8), type)
    with (
        Weights(tmp_path, torch.float32) as weights,
        pytest.raises(ValueError, match=f"{type.name} cannot be dequantized"),
    ):
        weights.take("model.layers.0.mlp.down_proj.weight", 2, 512)
