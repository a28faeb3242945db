"""A GGUF's metadata become the files of Hugging Face's layout; what cannot run is refused, with a way out."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from api.tokens.tokenizer import eos_token_ids
from replica.model.config import Llama3Scaling, read_config
from replica.model.demo import CACHE_VARIABLE
from replica.model.gguf import folder as module
from replica.model.gguf.folder import write_texts
from replica.model.locate import locate
from tests.replica.model.gguf.files import folder_of, gguf_of, llama3_divisors
from tests.replica.models import LLAMA3, saved


def refusal(file: Path, folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        write_texts(file, folder)
    assert not any(folder.glob("*.json"))
    return str(caught.value)


@pytest.mark.parametrize("name", ["llama", "llama-biased", "llama-odd", "qwen2", "qwen3"])
def test_the_configuration_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    made = read_config(folder_of(gguf_of(name, tmp_path), tmp_path / "folder"))
    known = read_config(saved(name, tmp_path / "saved"))
    assert msgspec.structs.replace(made, rms_norm_eps=known.rms_norm_eps) == known
    assert np.float32(made.rms_norm_eps) == np.float32(known.rms_norm_eps)


def test_divisors_of_rope_are_known_by_their_values(tmp_path: Path) -> None:
    rope = LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 32.0}
    file = gguf_of("llama", tmp_path, {"llama.rope.freq_base": 500_000.0}, llama3_divisors(rope, 16))
    scaling = read_config(folder_of(file, tmp_path / "folder")).rope_scaling
    assert scaling == Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


@pytest.mark.parametrize(
    "divisors",
    [llama3_divisors(LLAMA3, 16), np.full(8, np.nan), np.full(8, np.inf), np.zeros(8), np.ones(7), np.ones((8, 1))],
    ids=["other positions", "nan", "inf", "zero", "count", "shape"],
)
def test_other_divisors_are_refused(divisors: "np.ndarray[Any, Any]", tmp_path: Path) -> None:
    file = gguf_of("llama", tmp_path, {"llama.rope.freq_base": 500_000.0}, divisors)
    assert "; run it in vLLM and put the router in front" in refusal(file, tmp_path)


def test_defaults_of_sampling_are_kept(tmp_path: Path) -> None:
    changes = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.25}
    folder = folder_of(gguf_of("llama", tmp_path, changes), tmp_path / "folder")
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 20,
        "repetition_penalty": 1.25,
    }
    assert not (folder_of(gguf_of("qwen2", tmp_path), tmp_path / "without") / "generation_config.json").exists()


@pytest.mark.parametrize(("flags", "dtype"), [("fpu avx512f avx512_bf16", "bfloat16"), ("fpu avx512f", "float32")])
def test_quantized_weights_are_computed_as_the_processor_is_quickest(
    flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROCESSORS", tmp_path / "cpuinfo")
    module.PROCESSORS.write_text(f"flags\t\t: {flags}\n")
    quantized = gguf_of("llama", tmp_path, type=GGMLQuantizationType.Q8_0)
    assert read_config(folder_of(quantized, tmp_path / "quantized")).dtype == dtype
    assert read_config(folder_of(gguf_of("llama", tmp_path), tmp_path / "plain")).dtype == "float32"


def test_an_output_ends_with_a_text_a_turn_or_a_message(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    assert eos_token_ids(folder_of(gguf_of("llama", tmp_path, changes), tmp_path / "folder")) == (319, 5, 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"general.architecture": "gemma3"},
            "the architecture 'gemma3' is not supported, only llama, qwen2, qwen3; run",
        ),
        ({"general.architecture": "a" * 10_000}, "the architecture 'aaaa"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not supported; run it in vLLM"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn', which is not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, which is not supported"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "head_count_kv is a list, one for each layer"),
        ({"llama.attention.head_count": "many"}, 'num_attention_heads is "many"; it must be a whole number'),
        ({"llama.block_count": None}, "has no num_hidden_layers"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'; only gpt2 works: name a folder"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; only default, gpt-2, smollm, llama-bpe"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer.ggml.eos_token_id": 320}, "its eos_token is 320, which none of its 320 tokens is"),
        ({"tokenizer.ggml.token_type": [1]}, "it has no list of 320 numbers tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.tokens": ["a"] * 321}, "it has 321 tokens and only 320 embeddings"),
        ({"tokenizer.ggml.merges": ["a c"]}, "its tokenizer cannot be built: "),
        ({"tokenizer.ggml.merges": ["a"]}, "its tokenizer cannot be built: "),
        ({"tokenizer.ggml.merges": None}, "it has no list of strings tokenizer.ggml.merges"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_run_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    said = refusal(gguf_of("llama", tmp_path, changes), tmp_path)
    assert words in said
    assert said.startswith(str(tmp_path / "llama.gguf"))
    assert len(said) < len(str(tmp_path)) + 300


# ---- the folder in the cache


def test_a_file_is_a_model_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    file = gguf_of("llama", tmp_path)
    folder = locate("llama.gguf")
    assert folder is not None and folder.name.startswith("llama-")
    assert read_config(folder).num_layers == 3
    assert (folder / "model.gguf").resolve() == file
    (folder / "made_once").touch()
    assert locate(str(file)) == folder and (folder / "made_once").exists()
    gguf_of("llama", tmp_path, {"llama.context_length": 128})
    other = locate(str(file))
    assert other not in (None, folder) and read_config(other).max_position_embeddings == 128
    assert not [left for left in (tmp_path / "cache" / "gguf").iterdir() if left.name.startswith(".")]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(OSError, match=rf"cannot be written to .*; set {CACHE_VARIABLE} to a folder"):
        locate(str(gguf_of("llama", tmp_path)))
