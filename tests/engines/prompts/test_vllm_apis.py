"""Chats that vLLM 0.33.0 makes of other APIs' requests, as its template shows them: recorded at its render routes."""

import json
from typing import Any

import pytest

from api.errors import ApiError
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer
from engines.prompts.vllm import Vllm
from tests.engines.prompts.test_vllm import AS_JSON, USER, U, read

TOOL = {"name": "f", "input_schema": {"properties": {"a": {"type": "string"}}}}
SHOWN_TOOL = (
    '[{"type": "function", "function": {"name": "f", "description": null, "parameters": '
    '{"properties": {"a": {"type": "string"}}, "type": "object"}}}]'
)
BILLING = {"type": "text", "text": "x-anthropic-billing-header: a\nrest"}
NONE = 'null|null|true|"UNDEF"|"UNDEF"|"UNDEF"'

MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [U]}, f"[{USER}]|{NONE}"),
    ({"messages": [U], "system": "You are"}, f'[{{"role": "system", "content": "You are"}}, {USER}]|{NONE}'),
    ({"messages": [U], "system": "x-anthropic-billing-header: a\nrest"},
     f'[{{"role": "system", "content": "rest"}}, {USER}]|{NONE}'),
    ({"messages": [U], "system": [BILLING, {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                                  {"type": "text", "text": "b"}]},
     f'[{{"role": "system", "content": "ab"}}, {USER}]|{NONE}'),
    ({"messages": [U,
                   {"role": "assistant", "content": [
                       {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "calling"},
                       {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}]},
                   {"role": "user", "content": [
                       {"type": "tool_result", "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "r1"}, {"type": "text", "text": "r2"}]},
                       {"type": "text", "text": "and"}, {"type": "text", "text": "more"}]}], "tools": [TOOL]},
     f'[{USER}, {{"role": "assistant", "content": "calling", "tool_calls": [{{"id": "t1", "function": '
     '{"arguments": {"a": "é"}, "name": "f"}, "type": "function"}], "reasoning": "hm", "reasoning_content": "hm"}, '
     '{"role": "tool", "content": "r1\\nr2", "tool_call_id": "t1"}, {"role": "user", "content": "and\\nmore"}]|'
     f'{SHOWN_TOOL}|null|true|"UNDEF"|"UNDEF"|"UNDEF"'),
    ({"messages": [U], "tools": [TOOL], "tool_choice": {"type": "none"}},
     f'[{USER}]|{SHOWN_TOOL}|null|true|"UNDEF"|"UNDEF"|"UNDEF"'),
    ({"messages": [U], "thinking": {"type": "enabled", "budget_tokens": 1024}}, f"[{USER}]|{NONE}"),
    ({"messages": [U], "thinking": {"type": "disabled"}}, f'[{USER}]|null|null|true|false|"none"|"UNDEF"'),
    ({"messages": [U], "output_config": {"effort": "high"}}, f'[{USER}]|null|null|true|true|"high"|"UNDEF"'),
    ({"messages": [U, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, U]},
     f'[{USER}, {{"role": "assistant", "content": ""}}, {USER}]|{NONE}'),
    ({"messages": [U], "chat_template_kwargs": {"foo": 1}}, f'[{USER}]|null|null|true|"UNDEF"|"UNDEF"|1'),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "shown"), MESSAGES)
def test_messages_become_the_engines_chat(fields: dict[str, Any], shown: str) -> None:
    assert read(AS_JSON, "messages", max_tokens=9, **fields) == shown


OUTPUT = {"type": "output_text", "text": "b", "annotations": []}
CALLS = [
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
    {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "x"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
]
CALLED = (
    '[{"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}, "type": "function"}, '
    '{"id": "c2", "function": {"name": "g", "arguments": {}}, "type": "function"}]'
)
ANSWERED = (
    '{"role": "tool", "content": "x", "tool_call_id": "c1"}, {"role": "tool", "content": "y", "tool_call_id": "c2"}'
)

RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": "Hi"}, f"[{USER}]|{NONE}"),
    ({"input": [U, {"role": "assistant", "content": "yes"}, U], "instructions": "You are"},
     f'[{{"role": "system", "content": "You are"}}, {USER}, {{"role": "assistant", "content": "yes"}}, {USER}]|{NONE}'),
    ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [OUTPUT]},
                {"role": "developer", "content": "dev"}, U]},
     f'[{{"role": "system", "content": "dev"}}, {USER}, {{"role": "assistant", "content": "b"}}, {USER}]|{NONE}'),
    ({"input": [U, {"type": "reasoning", "id": "r", "content": [{"type": "x", "text": "think"}]}, *CALLS]},
     f'[{USER}, {{"role": "assistant", "content": "", "tool_calls": {CALLED}, "reasoning": "think", '
     f'"reasoning_content": "think"}}, {ANSWERED}]|{NONE}'),
    ({"input": [U, {"role": "assistant", "content": "a"}, *CALLS, {"role": "assistant", "content": "b"},
                {"role": "assistant", "content": "c"}, U]},
     f'[{USER}, {{"role": "assistant", "content": "a", "tool_calls": {CALLED}}}, {ANSWERED}, '
     f'{{"role": "assistant", "content": "b"}}, {{"role": "assistant", "content": "c"}}, {USER}]|{NONE}'),
    ({"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": None, "strict": False}]},
     f'[{USER}]|[{{"type": "function", "function": {{"name": "f", "description": null, "parameters": null, '
     '"strict": false}}]|null|true|"UNDEF"|"UNDEF"|"UNDEF"'),
    ({"input": "Hi", "reasoning": {"effort": "low"}}, f'[{USER}]|null|null|true|true|"low"|"UNDEF"'),
    ({"input": "Hi", "text": {"format": {"type": "json_object"}}, "store": False}, f"[{USER}]|{NONE}"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "shown"), RESPONSES)
def test_an_input_becomes_the_engines_chat(fields: dict[str, Any], shown: str) -> None:
    assert read(AS_JSON, "responses", **fields) == shown


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ("messages", {"messages": [U], "tools": [{"type": "web_search", "name": "w"}]}, "tools"),
        ("messages", {"messages": [U, {"role": "system", "content": "inline"}]}, "messages"),
        ("responses", {"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"input": "Hi", "truncation": "auto"}, "truncation"),
        ("responses", {"input": [{"type": "computer_call"}]}, "input"),
        ("responses", {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input"),
        ("responses", {"input": "Hi", "tools": [{"type": "web_search"}]}, "tools"),
    ],
)
def test_what_cannot_be_known_names_the_field(api: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(AS_JSON, api, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("api", "field", "special"),
    [
        ("responses", "input", True),
        ("completions", "prompt", True),
        ("messages", "messages", False),
        ("chat", "messages", False),
    ],
)
def test_special_tokens_are_added_where_the_engine_adds_them(api: str, field: str, special: bool) -> None:
    body = json.dumps({"model": "m", field: [U] if field == "messages" else "Hi"}).encode()
    assert Vllm(Prompts(ByteTokenizer(), AS_JSON)).read(api, body).special_tokens is special


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}", "low"),
        ("plain", "plain"),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_thinking_is_disabled_as_the_template_allows(template: str, shown: str) -> None:
    assert read(template, "messages", messages=[U], thinking={"type": "disabled"}) == shown


@pytest.mark.parametrize(("api", "fields"), [("messages", {"messages": [U]}), ("responses", {"input": "Hi"})])
def test_the_tokenize_route_does_not_see_how_a_chat_is_made(api: str, fields: dict[str, Any]) -> None:
    engine = Vllm(Prompts(ByteTokenizer(), AS_JSON))
    body = json.dumps({"model": "m"} | fields).encode()
    asked = engine.tokenized(api, body)
    assert asked is not None and asked.unseen == api
    special = {"add_special_tokens": True} if api == "responses" else {}
    assert json.loads(asked.body) == {"model": "m", "messages": [U]} | special
