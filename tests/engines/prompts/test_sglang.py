"""Chats as SGLang 0.5.23 hands them to templates that show them as JSON: recorded at its own classes."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.errors import ApiError
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer
from engines import PROFILES
from engines.prompts.asked import Asked
from engines.prompts.sglang import Sglang

VECTORS = Path(__file__).parents[2] / "data" / "vectors" / "sglang_prompts.jsonl"
RECORDED = [json.loads(line) for line in VECTORS.read_text().splitlines()]
SHOWN = ("messages", "tools", "documents", "add_generation_prompt")
ARGUMENTS = ("enable_thinking", "thinking", "reasoning_effort", "foo")
AS_JSON = "|".join(f"{{{{ ({name} if {name} is defined else 'UNDEF') | tojson }}}}" for name in (*SHOWN, *ARGUMENTS))
TEMPLATES = {
    "string": AS_JSON,
    "parts": "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}" + AS_JSON,
    "pictures": "{# an image #}" + AS_JSON,
}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def read(template: str, fields: dict[str, Any], api: str = "chat") -> Asked:
    return Sglang(Prompts(ByteTokenizer(), TEMPLATES[template])).read(api, json.dumps(fields).encode())


@pytest.mark.parametrize("recorded", [one for one in RECORDED if one["followed"]], ids=lambda one: str(one["body"]))
def test_a_prompt_is_the_one_that_the_engine_makes(recorded: dict[str, Any]) -> None:
    assert read(recorded["template"], recorded["body"]).texts == [recorded["prompt"]]


@pytest.mark.parametrize("recorded", [one for one in RECORDED if not one["followed"]], ids=lambda one: str(one["body"]))
def test_the_engine_is_asked_for_a_prompt_that_is_not_followed(recorded: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        read(recorded["template"], recorded["body"])


def test_what_a_template_may_branch_on_is_in_a_shape() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bodies: list[dict[str, Any]] = [
        {"messages": [USER]},
        {"messages": [USER, {"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [call, call]}, {"role": "tool", "content": "x"}]},
        {"messages": [USER, {"role": "system", "content": "x", "name": "n"}]},
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [USER], "response_format": {"type": "json_object"}},
        {"messages": [USER], "chat_template_kwargs": {"foo": 1}},
    ]
    assert len({read("string", body).shape for body in bodies}) == len(bodies)
    assert read("string", {"messages": [USER], "tools": [TOOL, TOOL]}).shape == read("string", bodies[6]).shape


@pytest.mark.parametrize(
    "types", ["varchar", ["string", "uint"], ["string", "string"], ["null", {}]], ids=lambda one: json.dumps(one)
)
def test_no_client_takes_a_shape_of_tools_from_others_by_types_that_the_engine_rewrites(types: object) -> None:
    parameters = {"type": "object", "properties": {"a": {"anyOf": [{"type": types}]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ApiError, match="none of JSON Schema"):
        read("string", {"messages": [USER], "tools": [tool]})


def test_the_engine_is_asked_about_all_that_it_would_read_of_a_chat() -> None:
    question = PROFILES["sglang"].question
    assert question is not None
    body = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"task":{"a":1e3},"add_generation_prompt":false}'
    asked = question("chat", body, False)
    assert asked is not None and asked.path == "/tokenize" and asked.unseen is None
    assert asked.body == b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"task":{"a":1e3}}'
    whole = question("completions", b'{"model":"m","prompt":["a"],"add_special_tokens":false}', False)
    assert whole is not None and msgspec.json.decode(whole.body) == {"model": "m", "prompt": "a"}
    assert question("completions", b'{"prompt":["a","b"]}', False) is None and question("chat", body, True) is None
    assert question("messages", body, False) is None and question("responses", body, False) is None
