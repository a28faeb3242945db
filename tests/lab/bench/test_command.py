"""`warmroute bench`, as users run it, against an endpoint that answers at once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lab.bench.probe import target_of
from lab.commands.bench import bench
from tests.lab.bench.endpoints import Call, endpoint


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(bench, [str(one) for one in arguments], env=environment, standalone_mode=False)


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(bench, [str(one) for one in arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def measured(*arguments: object, **environment: str) -> Any:
    result = run(*arguments, "--json", **environment)
    assert result.exception is None, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ftp://h",), "'ftp://h' is not a URL; write http://HOST:PORT"),
        (("http://h:1", "--workload", "abacus"), "'abacus' is not one of 'chatbot'"),
        (("http://h:1", "--rate", "0"), "0.0 is not in the range"),
        (("http://h:1", "--rate", "5", "--concurrency", "4"), "--rate does not work with --concurrency"),
        (("http://h:1", "--trace", "t", "--workload", "rag"), "--workload does not work with --trace"),
        (("http://h:1", "--speed", "2"), "--speed has no effect without --trace"),
        (("http://h:1", "--think", "2"), "--think has no effect without --workload multi-turn"),
        (("http://h:1", "--closed-loop"), "--closed-loop needs sessions; give --workload multi-turn, or a --trace"),
        (("http://h:1", "--warm-up", "10s"), "'10s' is not a valid integer"),
        (("http://h:1", "--trace", "/no/such/trace"), "cannot read '/no/such/trace': No such file"),
        (
            ("http://h:1", "--api-key", "two words"),
            "Invalid value for '--api-key': The key is empty or has characters that are invalid in a header",
        ),
    ],
)
def test_a_value_that_cannot_be_used_is_reported_with_a_fix(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(*arguments)


def test_the_result_has_all_figures_the_machine_and_what_was_asked() -> None:
    with endpoint(lambda call: call.answer(tokens=3, cached=5)) as server:
        found = measured(f"{server.url}/v1/", "--requests", 10, "--seed", 3, "--concurrency", 2)
    [one] = found["endpoints"]
    assert (found["format"], found["interrupted"]) == ("warmroute-bench/1", False)
    assert found["machine"]["cpus"] > 0
    assert (found["settings"]["seed"], found["settings"]["requests"]) == (3, 10)
    assert (one["url"], one["probe"]["model"]) == (server.url, "m")
    figures = one["figures"]
    assert (figures["requests"], figures["failed"], figures["output_tokens"], figures["cached_tokens"]) == (
        10,
        0,
        30,
        50,
    )
    assert figures["ttft_s"]["p50"] <= figures["ttft_s"]["p99"] <= figures["e2e_s"]["max"]
    assert one["own"][0]["cpu_s"] > 0


def test_it_asks_for_a_time_unless_a_number_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lab.commands.bench.USUAL_S", 0.3)
    with endpoint() as server:
        figures = measured(server.url, "--concurrency", 1)["endpoints"][0]["figures"]
        assert figures["requests"] > 1 and figures["span_s"] < 5
        assert len(server.calls) == figures["requests"]
        assert measured(server.url, "--requests", 3)["endpoints"][0]["figures"]["requests"] == 3
        trace = a_trace(tmp_path / "t.jsonl", 60)  # 0.6 s of it
        assert measured(server.url, "--trace", trace)["endpoints"][0]["figures"]["requests"] == 60


def test_equal_seeds_send_the_same_and_others_do_not() -> None:
    def sent(seed: int) -> list[Any]:
        with endpoint() as server:
            measured(server.url, "--requests", 5, "--concurrency", 1, "--seed", seed)
            return [call.body for call in server.calls]

    assert sent(1) == sent(1)
    assert sent(1) != sent(2)


def test_the_key_of_the_environment_is_sent_and_not_shown() -> None:
    with endpoint() as server:
        found = run(server.url, "--requests", 1, "--json", OPENAI_API_KEY="sesame")
        assert server.calls[0].headers["authorization"] == "Bearer sesame"
    assert "sesame" not in found.output


def test_a_key_of_the_environment_that_leaves_the_machine_is_reported_once() -> None:
    away = run("http://nowhere.invalid:1", "--model", "m", "--timeout", 2, OPENAI_API_KEY="sesame").stderr
    assert away.count("OPENAI_API_KEY from the environment is sent to http://nowhere.invalid:1; unset it") == 1
    assert "sesame" not in away
    given = run("http://nowhere.invalid:1", "--model", "m", "--timeout", 2, "--api-key", "sesame").stderr
    assert "environment" not in given
    with endpoint() as server:
        near = run(server.url, "--requests", 1, OPENAI_API_KEY="sesame")
    assert near.exception is None and near.stderr == ""


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat/completions", "/v1/completions/", "/chat/completions", "/completions"]
)
def test_a_url_of_one_call_stands_for_the_root(path: str) -> None:
    assert target_of(f"https://h:1{path}").url == "https://h:1"
    assert target_of(f"http://h:1/models/llama{path}").url == "http://h:1/models/llama"


def a_trace(path: Path, requests: int) -> Path:
    lines = [{"timestamp": 10 * n, "input_length": 9, "output_length": 2, "hash_ids": [n]} for n in range(requests)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("warm_up", [3, 4])
def test_a_warm_up_that_takes_the_whole_trace_is_refused(tmp_path: Path, warm_up: int) -> None:
    trace = a_trace(tmp_path / "t.jsonl", 3)
    said = refused("http://h:1", "--trace", trace, "--warm-up", warm_up)
    assert f"--warm-up {warm_up} leaves none of the 3 requests in" in said


def test_a_table_says_what_failed_and_how() -> None:
    def every_other(call: Call) -> None:
        call.refuse(429, "[queue] full") if call.number % 2 else call.answer(x_warmroute_replica="r0")

    with endpoint(every_other) as server:
        result = run(server.url, "--requests", 6, "--concurrency", 1)
    assert result.return_value == 0
    said = " ".join(result.stdout.split())
    assert "3 failed, 3 with status 429" in said
    assert "3 x status 429: [queue] full" in said
    assert "r0 3 100.0%" in said


def test_if_nothing_was_answered_the_status_is_1() -> None:
    with endpoint(lambda call: call.refuse(500, "no")) as server:
        assert run(server.url, "--requests", 2).return_value == 1


def test_an_endpoint_that_cannot_be_asked_is_one_line_and_status_1() -> None:
    with endpoint(on_probe=lambda call: call.refuse(401, "no key")) as server:
        result = CliRunner().invoke(bench, [server.url])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["bench", "http://127.0.0.1:9", "--timeout", "1"], 1, "does not answer: no connection"),
        (["size", "demo", "--memory-gb", "1"], 0, ""),
    ],
    ids=["bench", "size"],
)
def test_a_base_install_is_enough(arguments: list[str], status: int, said: str) -> None:
    missing = ("torch", "numpy", "matplotlib", "ray", "safetensors", "huggingface_hub")
    code = f"import sys\nfor name in {missing}: sys.modules[name] = None\nfrom fleet.cli import main\nmain({arguments})"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert finished.returncode == status
    assert said in finished.stderr and bool(said) == bool(finished.stderr)
