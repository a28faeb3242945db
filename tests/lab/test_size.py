"""`warmroute size`, as users run it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lab.commands.size import size

LLAMA_8B_FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(size, arguments)


def shown(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(*arguments, "--json"))
    return found


def test_an_8b_model_on_80_gb() -> None:
    exact = answer("llama-3-8b", "--memory-gb", "80")
    assert (exact["weights_bytes"], exact["kv_bytes"]) == (16_060_522_496, 55_939_477_504)
    assert (exact["kv_bytes_per_token"], exact["kv_bytes_per_block"]) == (131_072, 2_097_152)
    assert (exact["blocks"], exact["tokens"]) == (26_674, 426_784)


def test_a_70b_model_in_int4_with_45_gb_for_kv() -> None:
    found = answer("llama-3-70b", "--quantization", "int4", "--kv-gb", "45")
    assert (found["kv_bytes_per_block"], found["blocks"], found["tokens"]) == (5_242_880, 8_583, 137_328)
    text = shown("llama-3-70b", "--quantization", "int4", "--kv-gb", "45")
    assert "8,583 blocks = 137,328 tokens" in text


def test_every_term_is_shown() -> None:
    assert shown("llama-3-8b", "--memory-gb", "80", "--workspace-gb", "2").splitlines() == [
        "model          llama-3-8b",
        "parameters     8,030,261,248",
        "weights        16.06 GB  bfloat16",
        "for KV         53.94 GB  = 80 GB x 0.9 - 16.06 GB - 2.00 GB",
        "KV of a token  131,072 bytes  bfloat16",
        "KV of a block  2,097,152 bytes  16 tokens",
        "fits           25,720 blocks = 411,520 tokens",
        "               200 requests of 2,048 tokens at once",
        "               50 requests of 8,192 tokens at once",
    ]


@pytest.mark.parametrize("as_file", [False, True])
def test_a_folder_or_its_config_stands_for_its_shape(as_file: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B_FIELDS))
    found = answer(str(tmp_path / "config.json" if as_file else tmp_path), "--memory-gb", "80")
    assert (found["parameters"], found["blocks"]) == (8_030_261_248, 26_674)


def test_the_longest_request_counts_too() -> None:
    assert [each["tokens"] for each in answer("mistral-7b", "--memory-gb", "24")["fitting"]] == [2048, 8192, 32_768]
    assert [each["tokens"] for each in answer("demo", "--memory-gb", "1")["fitting"]] == [2048, 8192]


def test_smaller_numbers_leave_more_room() -> None:
    blocks = {
        options: answer("llama-3-8b", "--memory-gb", "24", *options.split())["blocks"]
        for options in ("--dtype bfloat16", "--quantization int8", "--quantization int4", "--kv-dtype fp8")
    }
    assert sorted(blocks.values())[0] == blocks["--dtype bfloat16"]
    assert blocks["--kv-dtype fp8"] == pytest.approx(2 * blocks["--dtype bfloat16"], abs=1)
    assert blocks["--quantization int4"] > blocks["--quantization int8"]


def test_devices_share_weights_and_heads() -> None:
    found = answer("llama-3-70b", "--memory-gb", "141", "--tensor-parallel", "4")
    assert found["weights_bytes"] == 70_553_706_496 * 2 // 4
    assert found["kv_bytes_per_token"] == 327_680 // 4
    wide = answer("llama-3-70b", "--memory-gb", "141", "--tensor-parallel", "16")
    assert wide["kv_bytes_per_token"] == 327_680 // 8, "a device holds at least one head"


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    result = run("llama-3-70b", "--memory-gb", "80")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: llama-3-70b: weights of 141.11 GB and one block of KV do not fit into 72.00 GB (80 GB x 0.9): "
        "69.11 GB are missing; give a larger device, --quantization, or more devices with --tensor-parallel\n"
    )
    assert "hold no block of 2.10 MB; give more" in run("llama-3-8b", "--kv-gb", "0.002").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama-3-8b",), "Give one of --memory-gb and --kv-gb"),
        (("llama-3-8b", "--memory-gb", "80", "--kv-gb", "5"), "Give one of --memory-gb and --kv-gb"),
        (("llama-3-8b", "--kv-gb", "5", "--utilization", "0.5"), "--utilization does not work with --kv-gb; leave one"),
        (("llama-3-8b", "--kv-gb", "5", "--workspace-gb", "1"), "--workspace-gb does not work with --kv-gb"),
        (("llama-3-8b", "--memory-gb", "0"), "'--memory-gb': 0.0 is not in the range"),
        (("llama-3-8b", "--memory-gb", "nan"), "nan is not a finite number"),
        (("llama-3-8b", "--memory-gb", "80", "--utilization", "1.5"), "1.5 is not in the range"),
        (("llama-3-8b", "--memory-gb", "141", "--tensor-parallel", "3"), "3 does not divide the 8 KV heads"),
        (
            ("llama-9", "--memory-gb", "80"),
            "'llama-9' is neither a folder with a config.json nor one of demo, llama-3-8b",
        ),
    ],
)
def test_a_value_that_cannot_be_used_is_reported_with_a_fix(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_model_that_does_not_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B_FIELDS | {"architectures": ["BertModel"]}))
    result = run(str(tmp_path), "--memory-gb", "80")
    assert result.exit_code == 2
    assert "BertModel" in result.stderr
