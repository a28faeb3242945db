"""lm-evaluation-harness, on tasks and data of its own, with the replica's tokenizer or the model's files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL, URL = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
LM_EVAL = str(Path(sys.executable).with_name("lm_eval"))
QUESTIONS = [
    {
        "question": f"Question {number}: where does the train go?",
        "choices": ["to the sea", "home", "nowhere"],
        "gold": 1,
    }
    for number in range(4)
]
GENERATE = """\
task: ours_generate
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """\
task: ours_choose
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
LIKELIHOOD = """\
task: ours_likelihood
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{choices[gold]}}"
metric_list: [{metric: perplexity, aggregation: perplexity}, {metric: acc}]
"""
ROLLING = """\
task: ours_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
DATA = """\
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
TASKS = ("ours_generate", "ours_choose", "ours_likelihood", "ours_rolling")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in zip(TASKS, (GENERATE, CHOOSE, LIKELIHOOD, ROLLING), strict=True):
        (tmp_path / f"{name}.yaml").write_text(text + DATA.format(file=file))
    return tmp_path


def evaluate(tasks: Path, model: str, args: dict[str, Any], names: tuple[str, ...], *more: str) -> Any:
    told = ",".join(f"{name}={value}" for name, value in {"model": MODEL, **args}.items())
    where = ("--include_path", str(tasks), "--tasks", ",".join(names), "--output_path", str(tasks / "out"))
    command = [LM_EVAL, "run", "--model", model, "--model_args", told, *where, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    [results] = (tasks / "out").rglob("results_*.json")
    return json.loads(results.read_text())["results"]


def completions(**more: Any) -> dict[str, Any]:
    return {"base_url": f"{URL}/completions", "max_retries": 1, "auth_token": os.environ["OPENAI_API_KEY"], **more}


def check(results: Any, names: tuple[str, ...]) -> None:
    assert set(results) == set(names)
    if "ours_likelihood" in names:
        assert results["ours_likelihood"]["perplexity,none"] > 0
        assert results["ours_rolling"]["word_perplexity,none"] > 1
        assert 0 <= results["ours_choose"]["acc,none"] <= 1


def test_completions_with_the_replicas_tokenizer(tasks: Path) -> None:
    check(evaluate(tasks, "local-completions", completions(tokenizer_backend="remote"), TASKS), TASKS)


def test_completions_with_the_tokenizer_that_it_finds(tasks: Path) -> None:
    check(evaluate(tasks, "local-completions", completions(), TASKS), TASKS)


def test_completions_at_once(tasks: Path) -> None:
    args = completions(tokenizer_backend="remote", num_concurrent=4)
    check(evaluate(tasks, "local-completions", args, TASKS), TASKS)


def test_completions_in_batches(tasks: Path) -> None:
    args = completions(tokenizer_backend="remote")
    check(evaluate(tasks, "local-completions", args, TASKS, "--batch_size", "4"), TASKS)


def test_chat(tasks: Path) -> None:
    args = {"base_url": f"{URL}/chat/completions", "max_retries": 1}
    check(evaluate(tasks, "local-chat-completions", args, TASKS[:1], "--apply_chat_template"), TASKS[:1])
