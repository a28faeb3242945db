"""Tensors from safetensors files, whole or in shards, and the errors for broken ones."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from replica.model.progress import Progress
from replica.model.weights import Weights
from tests.late import transformers

SHAPE = (8, 4)


def one_file(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors or {"a": torch.arange(32.0).reshape(SHAPE)}, folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> "transformers.LlamaForCausalLM":
    """A tiny Llama as transformers saves a large one."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return model


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def refusal(folder: Path, *take: Any, dtype: torch.dtype = torch.float32) -> str:
    """The error when this tensor is taken (without one: when the weights are opened)."""
    try:
        with Weights(folder, dtype) as weights:
            weights.take(*take)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{take} was not refused")


def test_every_tensor_of_every_shard_is_found(tmp_path: Path) -> None:
    model = sharded(tmp_path)
    with Weights(tmp_path, torch.float32) as weights:
        for name, tensor in model.state_dict().items():
            assert torch.equal(weights.take(name, *tensor.shape), tensor)
        weights.finish()


def digest(folder: Path, *names: str) -> str:
    with Weights(folder, torch.bfloat16, digests=True) as weights:
        for name in names:
            weights.take(name, *SHAPE)
    return weights.digest


def test_the_digest_tells_weights_apart_wherever_they_lie(tmp_path: Path) -> None:
    zeros, one = torch.zeros(SHAPE), torch.zeros(SHAPE)
    one[-1, -1] = 1e-30  # lost in bfloat16
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
    one_file(folders[0], a=zeros, b=one)
    save_file({"a": zeros}, folders[1] / "first.safetensors")
    save_file({"b": one}, folders[1] / "second.safetensors")
    places = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}
    (folders[1] / "model.safetensors.index.json").write_text(json.dumps(places))
    one_file(folders[2], a=zeros, b=zeros.clone())
    one_file(folders[3], a=one, b=zeros)
    one_file(folders[4], a=zeros.bfloat16(), b=one)
    found = [digest(folder, "a", "b") for folder in folders]
    assert found[0] == found[1] and len(set(found)) == 4
    assert digest(folders[0], "a") not in found


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_in_the_dtype_that_is_wanted(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    original = torch.linspace(-3, 3, 32).reshape(SHAPE).to(stored)
    with Weights(one_file(tmp_path, a=original), wanted) as weights:
        tensor = weights.take("a", *SHAPE)
    assert tensor.dtype == wanted
    assert torch.equal(tensor, original.to(wanted))


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    one_file(tmp_path, a=torch.full(SHAPE, 70_000.0))
    assert "float16 cannot hold; use bfloat16 or float32" in refusal(tmp_path, "a", *SHAPE, dtype=torch.float16)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    one_file(tmp_path)
    assert "has no tensor b; the checkpoint does not fit" in refusal(tmp_path, "b", 1)
    assert "model.safetensors: a has shape (8, 4); config.json asks for (4, 8)" in refusal(tmp_path, "a", 4, 8)


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    one_file(tmp_path, a=torch.zeros(SHAPE, dtype=torch.int8), b=torch.zeros(SHAPE).to(torch.float8_e4m3fn))
    assert "a has dtype I8; quantized weights are not supported" in refusal(tmp_path, "a", *SHAPE)
    assert "b has dtype F8_E4M3; quantized weights are not supported" in refusal(tmp_path, "b", *SHAPE)


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        (None, "download the weights too"),
        ("pytorch_model.bin", "convert them to safetensors"),
        ("consolidated.00.pth", "convert them to safetensors"),
        ("q4.gguf", "name the file q4.gguf itself"),
        ("consolidated.safetensors", "consolidated.safetensors is not in Hugging Face's layout: convert it"),
    ],
)
def test_a_folder_without_weights_says_what_to_do(tmp_path: Path, file: str | None, advice: str) -> None:
    if file:
        (tmp_path / file).touch()
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path} has no model.safetensors, model.safetensors.index.json or model.gguf; ")
    assert advice in message


@pytest.mark.parametrize("kept_bytes", [0, 4, 40, -1])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, kept_bytes: int) -> None:
    file = one_file(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    assert f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file: " in refusal(tmp_path)


def test_a_pointer_instead_of_a_file_is_explained(tmp_path: Path) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4\n"
    (tmp_path / "model.safetensors").write_text(text)
    assert "is a pointer of Git LFS" in refusal(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    shards(tmp_path)[1].unlink()
    assert f"{tmp_path / 'model-00002-of-'}" in refusal(tmp_path)
    assert "is missing, which model.safetensors.index.json names; download the rest" in refusal(tmp_path)


def test_a_shard_of_another_model_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = shards(tmp_path)[0]
    save_file({"other": torch.zeros(1)}, shard)
    message = refusal(tmp_path)
    assert message.startswith(f"{shard} has no tensor ")
    assert message.endswith("which model.safetensors.index.json says it has; get both files again")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/model.safetensors", "..", ".", ""])
def test_an_index_cannot_point_elsewhere(tmp_path: Path, shard: str) -> None:
    index = {"weight_map": {"a": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"names the shard {shard!r}; shards must lie beside it" in refusal(tmp_path)


# ---- progress


def test_progress_goes_to_the_log_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "replica.model.progress")
    now_s = 100.0
    lines = Progress("loading llama", 16_000_000_000, clock_s=lambda: now_s)
    for now_s in (101.0, 109.9, 110.0, 115.0, 121.0):  # noqa: B007  # the clock reads it
        lines.advance(2_000_000_000)
    lines.finish()
    assert [record.getMessage() for record in caplog.records] == [
        "loading llama: 16.00 GB",
        "loading llama: 6.00 GB of 16.00 GB after 10 s",
        "loading llama: 10.00 GB of 16.00 GB after 21 s",
        "loading llama: done in 21.0 s",
    ]
