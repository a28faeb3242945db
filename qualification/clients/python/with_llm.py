"""The command `llm`, with the router as a model of its file of models."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = os.environ["MODEL"]
LLM = str(Path(sys.executable).with_name("llm"))
MODELS = f"""\
- model_id: ours
  model_name: {MODEL}
  api_base: {os.environ["OPENAI_BASE_URL"]}
  api_key_name: ours
  supports_tools: true
  supports_schema: true
- model_id: ours-completion
  model_name: {MODEL}
  api_base: {os.environ["OPENAI_BASE_URL"]}
  api_key_name: ours
  completion: true
"""


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of this command, with a key and models of their own."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS)
    (tmp_path / "keys.json").write_text(json.dumps({"ours": os.environ["OPENAI_API_KEY"]}))


def llm(*options: str) -> str:
    done = subprocess.run([LLM, *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("more", [(), ("--no-stream",)], ids=["stream", "whole"])
def test_prompt(more: tuple[str, ...]) -> None:
    assert llm("-m", "ours", "Hello", *more).strip()


def test_system_prompt_and_options() -> None:
    assert llm("-m", "ours", "-s", "Be kind.", "-o", "temperature", "0", "-o", "max_tokens", "10", "Hello").strip()


def test_conversation() -> None:
    llm("-m", "ours", "Hello")
    assert llm("-c", "And?").strip()


@pytest.mark.parametrize("more", [(), ("--no-stream",)], ids=["stream", "whole"])
def test_schema(more: tuple[str, ...]) -> None:
    found: Any = json.loads(llm("-m", "ours", "--schema", "name, age int, alive bool", "A person?", *more))
    assert isinstance(found["name"], str) and isinstance(found["age"], int) and isinstance(found["alive"], bool)


def test_list_of_a_schema() -> None:
    found: Any = json.loads(llm("-m", "ours", "--schema-multi", "name, age int", "People?"))
    assert all(set(item) == {"name", "age"} for item in found["items"])


def test_tool() -> None:
    assert llm("-m", "ours", "-T", "llm_time", "The time?").strip()


def test_completion() -> None:
    assert llm("-m", "ours-completion", "Hello", "-o", "max_tokens", "10").strip()


def test_usage() -> None:
    llm("-m", "ours", "Hello")
    [logged] = json.loads(llm("logs", "--json"))
    assert logged["input_tokens"] > 0 and logged["output_tokens"] > 0
