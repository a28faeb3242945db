"""`warmroute analyze`, as users run it."""

import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from lab.commands.analyze import analyze
from lab.trace.requests import Trace
from tests.lab.analysis.faults import FAULTS, SALT, TIMESTAMP, salted
from tests.lab.analysis.logs import chatbot, conversations, logged, write_log
from tests.lab.traffic import agents
from tests.processes import opened

SMALL = [
    {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2, 3]},
    {"timestamp": 1000, "input_length": 9, "output_length": 1, "hash_ids": [7, 8, 9]},
    {"timestamp": 2000, "input_length": 13, "output_length": 1, "hash_ids": [1, 2, 4, 5]},
    {"timestamp": 3000, "input_length": 13, "output_length": 1, "hash_ids": [7, 8, 10, 11]},
]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(analyze, list(map(str, arguments)))


def shown(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert all(" is too short to rely on: " in line for line in result.stderr.splitlines()), result.stderr
    return result.stdout


def answer(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(*arguments, "--json"))
    return found


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_trace(path: Path, trace: Trace) -> Path:
    lines = [
        {"timestamp": one.at_s * 1000, "input_length": one.input_tokens, "output_length": 1, "hash_ids": one.blocks}
        for one in trace.requests
    ]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "small.jsonl", SMALL)


def test_a_trace_that_is_too_short_says_what_would_be_enough(tmp_path: Path) -> None:
    trace = agents(1000)
    short = run(write_trace(tmp_path / "short.jsonl.gz", replace(trace, requests=trace.requests[:200])))
    assert short.stderr.startswith("Note: short is too short to rely on: of the tokens of its 200 requests ")
    assert short.stderr.endswith("at least 1,000 requests like these would be enough\n")
    assert run(write_trace(tmp_path / "long.jsonl.gz", trace)).stderr == ""


def test_a_trace_is_explained_line_by_line(small: Path) -> None:
    assert shown(small, "--block-tokens", "4", "--kv-bytes-per-token", "1000000000").splitlines() == [
        "trace           small",
        "requests        4",
        "input tokens    44",
        "blocks          10  full ones, of 4 tokens",
        "unique blocks   6",
        "shared blocks   4  in two requests or more",
        "reusable        4  every further use of a block",
        "could be saved  16 tokens = 36.4%, were nothing ever evicted",
        "shared prefix   4 tokens on the average; 2 requests have one",
        "",
        "cache                 hit rate  blocks  tokens     GB",
        "25 % of what can hit      9.1%       4      16  16.00",
        "50 % of what can hit     27.3%       5      20  20.00",
        "75 % of what can hit     27.3%       5      20  20.00",
        "90 % of what can hit     36.4%       6      24  24.00",
        "95 % of what can hit     36.4%       6      24  24.00",
        "99 % of what can hit     36.4%       6      24  24.00",
        "all of what can hit      36.4%       6      24  24.00",
        "For 90 % of what can hit, with 20 % headroom: 8 blocks = 32 tokens = 32.00 GB",
        "",
        "block size, if nothing is evicted  hit rate",
        "4 tokens                              36.4%",
        "8 tokens                              36.4%",
        "16 tokens                              0.0%",
        "32 tokens                              0.0%",
        "64 tokens                              0.0%",
        "",
        "Faults: not searched for, as a trace has no text",
        "  A log that has them is written by: warmroute router --request-log FILE --log-prompts",
    ]


def test_json_has_the_same_figures(small: Path) -> None:
    found = answer(small, "--block-tokens", "4", "--target-hit-rate", "0.5")
    assert found["sharing"]["saved_tokens"] == 16
    assert found["needed"]["exact"] == {"blocks": 5, "tokens": 20, "hit_rate": 12 / 44, "share": 0.75}
    assert found["needed"]["with_headroom"]["blocks"] == 6
    assert [size["block_tokens"] for size in found["block_sizes"]] == [4, 8, 16, 32, 64]
    assert "breaks" not in found


def test_a_folder_stands_for_its_model(small: Path, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert answer(small, "--block-tokens", "4", "--model", tmp_path)["needed"]["exact"]["gb"] == 24 * 512 / 1e9


def test_the_cache_is_never_smaller_than_the_longest_prompt(tmp_path: Path) -> None:
    lone = write_lines(tmp_path / "lone.jsonl", SMALL[:2])
    assert answer(lone, "--block-tokens", "4")["needed"]["with_headroom"]["blocks"] == 3
    assert "; the longest prompt takes that much" in shown(lone, "--block-tokens", "4")


def test_the_cache_there_is_can_be_asked_about(small: Path) -> None:
    found = answer(small, "--block-tokens", "4", "--capacity-tokens", "21")
    assert found["at_capacity"] == {"blocks": 5, "tokens": 20, "hit_rate": 12 / 44, "share": 0.75}
    said = shown(small, "--block-tokens", "4", "--capacity-tokens", "20")
    assert "host memory behind it  hit rate  loaded  tokens  prefill saved" in said
    assert "--capacity-tokens        27.3%       5      20" in said


def test_host_memory_behind_a_cache_finds_what_one_cache_of_their_size_would(small: Path) -> None:
    rates = ("--prefill-rate", "2", "--load-rate", "10")
    twice, *_, tenfold = answer(small, "--block-tokens", "4", "--capacity-tokens", "16", *rates)["with_host"]
    assert twice == {
        "host_tokens": 32,
        "hit_rate": pytest.approx(16 / 44),
        "loaded_rate": pytest.approx(12 / 44),
        "saved_s": pytest.approx(12 / 2 - 12 / 10),
    }
    assert tenfold["host_tokens"] == 160
    slow = answer(small, "--block-tokens", "4", "--capacity-tokens", "16", "--load-rate", "1000")["with_host"]
    assert [one["saved_s"] for one in slow] == [0, 0, 0], "loading is slower than computing"


def test_a_log_with_prompts_says_what_breaks_sharing(tmp_path: Path) -> None:
    name, make = FAULTS["ISO time, one question each"]
    path = write_log(tmp_path / "requests.log", logged([*make(), *conversations()]))
    [finding] = answer(path)["breaks"]["findings"]
    assert (finding["name"], finding["requests"]) == (name, 60)
    said = shown(path)
    assert f"  {TIMESTAMP}: 60 requests, about {finding['lost_tokens']:,} tokens lost" in said
    assert f"[{finding['example']['one']}]" in said and f"[{finding['example']['other']}]" in said
    assert finding["advice"] in said


def test_a_clean_log_is_reported_clean(tmp_path: Path) -> None:
    path = write_log(tmp_path / "requests.log", logged(chatbot()))
    assert "What breaks sharing: nothing found" in shown(path)


def test_a_log_without_prompts_says_how_to_get_them(tmp_path: Path) -> None:
    path = write_log(tmp_path / "requests.log", logged(chatbot(), bare=True))
    assert "not searched for, as this log has no prompts\n  A log that has them is written by: warmroute" in shown(path)
    mixed = write_log(tmp_path / "mixed.log", [*logged(chatbot(), bare=True), *logged(chatbot())])
    assert "nothing found\n  60 of 120 requests have no body" in shown(mixed)


def test_text_cannot_command_the_terminal(tmp_path: Path) -> None:
    bodies = [body | {"cache_salt": f"\x1b]2;{at}\x07"} for at, body in enumerate(salted(chatbot()))]
    said = shown(write_log(tmp_path / "requests.log", logged(bodies)))
    assert SALT in said and "\\x1b]2;" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target-hit-rate", "0"), "0.0 is not in the range"),
        (("--target-hit-rate", "90"), "90.0 is not in the range"),
        (("--capacity-tokens", "15"), "15 is 3 blocks of 4, and the longest prompt takes 4; give 16 or more"),
        (("--model", "demo", "--kv-bytes-per-token", "1"), "give one of them"),
        (("--model", "abacus"), "'abacus' is neither a folder with a config.json nor one of demo, llama-3-8b"),
    ],
)
def test_a_value_that_cannot_be_used_is_reported_with_a_fix(small: Path, arguments: tuple[str, ...], said: str) -> None:
    result = run(small, "--block-tokens", "4", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_bad_line_is_named(small: Path, tmp_path: Path) -> None:
    with small.open("a") as file:
        file.write('{"timestamp": 1}\n')
    result = run(small)
    assert result.exit_code == 2
    assert f"{small}, line 5: " in result.stderr
    assert run(tmp_path / "nothing.jsonl").exit_code == 2


@pytest.mark.chaos
def test_thousands_of_requests_take_seconds(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "agents.jsonl.gz", agents(3000))
    started_s = time.monotonic()
    assert answer(path)["sharing"]["requests"] == 3000
    assert time.monotonic() - started_s < 20


@pytest.mark.chaos
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    trace = agents(3000)
    path = write_trace(tmp_path / "agents.jsonl.gz", Trace(trace.name, trace.block_tokens, list(trace.requests)))
    path.write_bytes(path.read_bytes() * 60)  # to be read for seconds, so that it is still read when the signal comes
    command = [sys.executable, "-m", "fleet", "analyze", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline_s = time.monotonic() + 20
        while str(path) not in opened(process.pid):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, b"")
    assert list(tmp_path.iterdir()) == [path]
