"""Configs as transformers writes them, now and before version 5, and refused ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from replica.model.config import Llama3Scaling, ModelConfig, parse_config, read_config
from tests.late import transformers

SHAPES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3")
PLAIN = {"architectures": ["LlamaForCausalLM"], **SHAPES}


def model_of(architecture: str, **others: Any) -> Any:
    """A real one, tiny."""
    if architecture == "Mistral":
        others = {"sliding_window": None} | others
    config = getattr(transformers, f"{architecture}Config")(**SHAPES, **others)
    return getattr(transformers, f"{architecture}ForCausalLM")(config)


def written_by_transformers(folder: Path, architecture: str, **others: Any) -> tuple[dict[str, Any], int]:
    """The fields of its config.json, and how many parameters the model has."""
    model = model_of(architecture, **others)
    model.config.architectures = [f"{architecture}ForCausalLM"]
    model.config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), model.num_parameters()


def as_before_version_5(fields: dict[str, Any]) -> dict[str, Any]:
    old = dict(fields)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    old["torch_dtype"] = old.pop("dtype", None)
    return old


def parsed(**changes: Any) -> ModelConfig:
    return parse_config(PLAIN | changes, "config.json")


def refusal(**changes: Any) -> str:
    with pytest.raises(ValueError) as refused:
        parsed(**changes)
    return str(refused.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_those_of_the_real_model(tmp_path: Path, architecture: str, tied: bool) -> None:
    _, parameters = written_by_transformers(tmp_path, architecture, tie_word_embeddings=tied)
    config = read_config(tmp_path)
    assert config.architecture == architecture.lower()
    assert config.tie_word_embeddings is tied
    assert config.parameters == parameters


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_spellings_say_the_same(tmp_path: Path, architecture: str, scaled: bool) -> None:
    rope = {"rope_theta": 500_000.0, **(LLAMA3 if scaled else {"rope_type": "default"})}
    new, _ = written_by_transformers(tmp_path, architecture, rope_parameters=rope, dtype="bfloat16")
    config = parse_config(new, "new")
    assert parse_config(as_before_version_5(new), "old") == config
    assert config.rope_theta == 500_000.0
    assert config.dtype == "bfloat16"
    assert (config.rope_scaling is not None) is scaled


def test_llama3_scaling_is_read_under_either_name_of_its_type() -> None:
    wanted = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    assert parsed(rope_theta=5e5, rope_scaling=LLAMA3).rope_scaling == wanted
    renamed = {"type": "llama3", **{key: value for key, value in LLAMA3.items() if key != "rope_type"}}
    assert parsed(rope_theta=5e5, rope_scaling=renamed).rope_scaling == wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_absent_key_means_what_it_means_to_transformers(architecture: str) -> None:
    """Leave only required keys in the file."""
    optional = {"num_key_value_heads", "head_dim"}
    heads = 32 if architecture.startswith("Qwen") else 8  # so that the default number of KV heads fits
    sizes: dict[str, Any] = {key: value for key, value in SHAPES.items() if key not in optional} | {
        "num_attention_heads": heads
    }
    if architecture == "Mistral":
        sizes["sliding_window"] = None
    if architecture == "Qwen2":
        sizes["hidden_size"] = 64
    real = getattr(transformers, f"{architecture}Config")(**sizes)
    config = parse_config({"model_type": architecture.lower(), **sizes}, "config.json")
    assert config.num_kv_heads == real.num_key_value_heads
    assert config.head_dim == getattr(real, "head_dim", real.hidden_size // real.num_attention_heads)
    assert config.rms_norm_eps == real.rms_norm_eps
    assert config.rope_theta == real.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == real.tie_word_embeddings
    model = getattr(transformers, f"{architecture}ForCausalLM")(real)
    assert config.parameters == model.num_parameters()


@pytest.mark.parametrize(
    "windows",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 5},
        {"use_sliding_window": True, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention", "full_attention"]},
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen2", "Qwen3"])
def test_a_window_that_no_layer_has_is_no_window(architecture: str, windows: dict[str, Any]) -> None:
    real = getattr(transformers, f"{architecture}Config")(**SHAPES, **windows)
    assert set(real.layer_types) == {"full_attention"}
    parsed(architectures=[f"{architecture}ForCausalLM"], **windows)


def test_a_window_that_no_text_outgrows_is_no_window() -> None:
    fields = PLAIN | {"architectures": ["MistralForCausalLM"], "sliding_window": 256}
    assert parse_config(fields, "config.json").architecture == "mistral"
    fields = PLAIN | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": False}
    assert parse_config(fields, "config.json").qkv_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            '"GemmaForCausalLM" is not supported; what works: LlamaForCausalLM, Mist',
        ),
        ({"architectures": None, "model_type": "gpt2"}, 'model_type "gpt2" is not supported; what works: LlamaForC'),
        ({"architectures": [], "model_type": None}, "model_type null is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type is "linear"; only "default" and "llama3"'),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 'rope_parameters: rope_type is "yarn"'),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between layers"),
        ({"rope_scaling": "dynamic"}, 'rope_scaling is "dynamic"; it must be an object'),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has no low_freq_factor, high_freq"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "it must be above low_freq_factor, which is 1"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
            "sliding_window is 64; that is less than the",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768},
            "sliding_window is 4096; that is less than the 32768 positions",  # as in transformers where it is absent
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 1,
            },
            "use_sliding_window is true; sliding windows are not supported",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"]},
            'layer_types is ["chunked_attention"]',
        ),
        ({"layer_types": 5}, "layer_types is 5; it must be a list of names"),
        ({"layer_types": "full_attention"}, 'layer_types is "full_attention"; it must be a list of names'),
        ({"layer_types": [[]]}, "layer_types is [[]]; it must be a list of names"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            'layer_types is ["sliding_attention"]; sliding windows are not supported',
        ),
        ({"quantization_config": {"quant_method": "awq"}}, 'the weights are quantized ("awq"), which is not supported'),
        ({"quantization_config": "a\x1b[31m\nb"}, r'quantized ("a\u001b[31m\nb"), which'),
        ({"architectures": ["a\x1b[31m\nb"]}, r'architecture "a\u001b[31m\nb" is not supported'),
        ({"architectures": None, "model_type": "a\nb"}, r'model_type "a\nb" is not supported'),
        ({"rope_parameters": {"a\nb": {}}}, r'differs between layers (["a\nb"])'),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only "silu"'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads, which is 4"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"head_dim": None, "hidden_size": 33}, "hidden_size is 33; num_attention_heads, which is 4, must divide it"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number from 1"),
        ({"vocab_size": "96"}, 'vocab_size is "96"'),
        ({"vocab_size": True}, "vocab_size is true"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number above 0"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_theta": 10**400}, f"rope_theta is 1{'0' * 199}...; it must be a number above 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648; it must be a whole number from 1 to 2147483647"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 1000"),
        ({"max_position_embeddings": 1}, "max_position_embeddings is 1; it must be a whole number from 2"),
        ({"dtype": []}, "dtype is []; what works: float32"),
        ({"torch_dtype": {}}, "torch_dtype is {}; what works: float32"),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no"; it must be true or false'),
        ({"dtype": "float8_e4m3fn"}, 'dtype is "float8_e4m3fn"; what works: float32, bfloat16, float16'),
        ({"torch_dtype": "int8"}, 'torch_dtype is "int8"'),
        ({"hidden_size": None, "vocab_size": None}, "config.json has no vocab_size, hidden_size"),
    ],
)
def test_what_does_not_run_here_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "a list"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON: maximum recursion depth"),
        (b'{"a":' * 100_000, "is not JSON: maximum recursion depth"),
    ],
)
def test_a_broken_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)
