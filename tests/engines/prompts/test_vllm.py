"""Conversations as vLLM 0.33.0 hands them to a template that shows them as JSON: recorded at its render route."""

import json
from typing import Any

import pytest

from api.errors import ApiError
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer
from engines.prompts import asked
from engines.prompts.vllm import Vllm

SHOWN = ("messages", "tools", "documents", "add_generation_prompt", "enable_thinking", "reasoning_effort", "foo")
AS_JSON = "|".join(f"{{{{ ({name} if {name} is defined else 'UNDEF') | tojson }}}}" for name in SHOWN)
IN_PARTS = "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}" + AS_JSON

U = {"role": "user", "content": "Hi"}
CALL = {
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": 1.0, "b": [1e3, 12345678901234567890123]}', "zzz": 1},
    "id": "c1",
    "extra": 2,
}
CALLED = (
    '{"id": "c1", "function": {"arguments": {"a": 1.0, "b": [1000.0, 12345678901234567890123]}, "name": "f", '
    '"zzz": 1}, "type": "function", "extra": 2}'
)
USER = '{"role": "user", "content": "Hi"}'


def calls(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def read(template: str, api: str = "chat", **fields: Any) -> str:
    engine = Vllm(Prompts(ByteTokenizer(), template))
    [text] = engine.read(api, json.dumps({"model": "m"} | fields).encode()).texts
    assert isinstance(text, str)
    return text


MESSAGES: list[tuple[list[dict[str, Any]], str]] = [
    ([{"content": "Hi", "role": "user", "foo": 1}], USER),
    ([U | {"name": "bob"}], '{"role": "user", "content": "Hi", "name": "bob"}'),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
     '{"role": "user", "content": "a\\nb"}'),
    ([{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "a"}, "", " ",
                                   {"type": "refusal", "refusal": ""}, {"type": "text", "text": "\n"}]}],
     '{"role": "user", "content": "a\\n \\n\\n"}'),
    ([U, {"role": "assistant", "content": None, "tool_calls": [CALL]},
      {"role": "tool", "content": "res", "tool_call_id": "c1", "name": "f"}],
     USER + ', {"role": "assistant", "content": "", "tool_calls": [' + CALLED + ']}, '
     '{"role": "tool", "content": "res", "tool_call_id": "c1", "name": "f"}'),
    ([U, {"role": "assistant", "content": "x", "reasoning_content": "think", "tool_calls": []}],
     USER + ', {"role": "assistant", "content": "x", "reasoning": "think", "reasoning_content": "think"}'),
    ([U, {"role": "assistant", "content": "x", "refusal": None, "function_call": None, "tool_calls": None}],
     USER + ', {"role": "assistant", "content": "x"}'),
    ([{"role": "developer", "content": "dev"}, U], '{"role": "system", "content": "dev"}, ' + USER),
    ([{"role": "system", "content": "x-anthropic-billing-header: foo\nrest"}, U],
     '{"role": "system", "content": "rest"}, ' + USER),
    ([{"role": "system", "content": "x-anthropic-billing-header: foo"}, U],
     '{"role": "system", "content": ""}, ' + USER),
    ([{"role": "custom", "content": "x"}], '{"role": "custom", "content": "x"}'),
    ([{"role": "user"}, U], '{"role": "user", "content": ""}, ' + USER),
    ([U, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]}],
     USER + ', {"role": "assistant", "content": "a\\nno"}'),
    ([U, calls("nojson")],
     USER + ', {"role": "assistant", "content": "x", "tool_calls": '
     '[{"id": "1", "function": {"arguments": {}, "name": "f"}, "type": "function"}]}'),
    ([{"role": "user", "content": "é\u2028<b>&'😀"}], '{"role": "user", "content": "é\u2028<b>&\'😀"}'),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "shown"), MESSAGES)
def test_messages_are_those_that_the_engine_hands_to_its_template(messages: list[dict[str, Any]], shown: str) -> None:
    assert read(AS_JSON, messages=messages) == f'[{shown}]|null|null|true|"UNDEF"|"UNDEF"|"UNDEF"'


TEXT_PART = '{"type": "text", "text": "Hi"}'
PARTS: list[tuple[list[dict[str, Any]], str]] = [
    ([U], f'{{"role": "user", "content": [{TEXT_PART}]}}'),
    ([{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}],
     '{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}'),
    ([calls("{}") | {"content": None},
      {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
      {"role": "tool", "tool_call_id": "1", "content": "z", "name": "n"}],
     '{"role": "assistant", "content": [], "tool_calls": [{"id": "1", "function": {"arguments": {}, "name": "f"}, '
     '"type": "function"}]}, {"role": "tool", "content": "x\\ny", "tool_call_id": "1"}, '
     '{"role": "tool", "content": "z", "tool_call_id": "1", "name": "n"}'),
    ([{"role": "developer", "content": "Hi", "name": "n"}],
     f'{{"role": "developer", "content": [{TEXT_PART}], "name": "n", "tools": null}}'),
    ([{"role": "user", "content": []}], '{"role": "user", "content": []}'),
    ([{"role": "user", "content": [{"type": "text", "text": ""}, "Hi"]}],
     f'{{"role": "user", "content": [{{"type": "text", "text": ""}}, {TEXT_PART}]}}'),
    ([{"role": "tool", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "x"}]}],
     '{"role": "tool", "content": "\\nx"}'),
    ([{"role": "system", "content": "x-anthropic-billing-header: 1"}], '{"role": "system", "content": []}'),
    ([{"role": "user", "content": [{"type": "thinking", "thinking": "Hi", "closed": True}]}],
     f'{{"role": "user", "content": [{TEXT_PART}]}}'),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "shown"), PARTS)
def test_a_template_that_loops_over_parts_gets_parts(messages: list[dict[str, Any]], shown: str) -> None:
    knows_developer = IN_PARTS + "{# 'developer' #}"
    assert read(knows_developer, messages=messages) == f'[{shown}]|null|null|true|"UNDEF"|"UNDEF"|"UNDEF"'


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": None}}]},
     '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}]|null|true|'
     '"UNDEF"|"UNDEF"|"UNDEF"'),
    ({"tools": [{"function": {"parameters": {"type": "object", "properties": {"a": {"minimum": 1.0, "maximum": 10}}},
                              "name": "f", "zzz": 4, "strict": True, "description": "d"},
                 "type": "function", "cache_control": {"type": "x"}, "defer_loading": True}]},
     '[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", '
     '"properties": {"a": {"minimum": 1.0, "maximum": 10}}}, "strict": true, "defer_loading": true}, '
     '"defer_loading": true}]|null|true|"UNDEF"|"UNDEF"|"UNDEF"'),
    ({"documents": [{"title": "a", "text": "b"}]},
     'null|[{"title": "a", "text": "b"}]|true|"UNDEF"|"UNDEF"|"UNDEF"'),
    ({"reasoning_effort": "high"}, 'null|null|true|true|"high"|"UNDEF"'),
    ({"reasoning_effort": "none"}, 'null|null|true|false|"none"|"UNDEF"'),
    ({"chat_template_kwargs": {"foo": [1, {"a": None}], "enable_thinking": False, "reasoning_effort": "low"},
      "reasoning_effort": "high"}, 'null|null|true|false|"high"|[1, {"a": null}]'),
    ({"chat_template_kwargs": {"foo": None, "enable_thinking": "auto"}},
     'null|null|true|"UNDEF"|"UNDEF"|"UNDEF"'),
    ({"add_generation_prompt": False}, 'null|null|false|"UNDEF"|"UNDEF"|"UNDEF"'),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "shown"), FIELDS)
def test_fields_are_those_that_the_engine_hands_to_its_template(fields: dict[str, Any], shown: str) -> None:
    assert read(AS_JSON, messages=[U], **fields) == f"[{USER}]|{shown}"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "guided_json": {}},
        {"echo": True, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1, "n": 3, "temperature": -1},
        {"tool_choice": "auto", "functions": [], "stop": ["a"] * 99, "priority": 7, "audio": {}, "suffix": "x"},
        {"kv_transfer_params": {"do_remote_decode": True}, "cache_salt": "a", "bad_words": ["x"], "user": "y" * 999},
    ],
)
def test_fields_that_leave_the_prompt_unchanged_are_not_looked_at(fields: dict[str, Any]) -> None:
    assert read(AS_JSON, messages=[U], **fields) == read(AS_JSON, messages=[U])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [U | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [U], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"messages": [U], "chat_template": "x"}, "chat_template"),
        ({"messages": [U], "kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
        ({"messages": [U], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"messages": [U], "tools": []}, "tools"),
        ({"messages": [U], "tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_prompt_that_cannot_be_known_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(AS_JSON, **fields)
    assert caught.value.param == param


ENGINE = Vllm(Prompts(ByteTokenizer(), AS_JSON))


def shape(**fields: Any) -> str | None:
    api = "chat" if "messages" in fields else "completions"
    return ENGINE.read(api, json.dumps({"model": "m"} | fields).encode()).shape


def test_a_shape_is_what_a_template_may_branch_on() -> None:
    one = shape(messages=[U, {"role": "assistant", "content": "a"}, U])
    assert one == shape(messages=[U, {"role": "assistant", "content": "b"}, U], n=3, echo=True)
    assert one == shape(messages=[U, {"role": "assistant", "content": "b"}] * 5 + [U])
    tool = {"type": "function", "function": {"name": "f", "description": "d"}}
    others = [
        shape(messages=[U]),
        shape(messages=[{"role": "system", "content": "a"}, U]),
        shape(messages=[U], tools=[tool]),
        shape(messages=[U], tools=[tool | {"function": {"name": "f"}}]),
        shape(messages=[U], tools=[tool], tool_choice="none"),
        shape(messages=[U], chat_template_kwargs={"enable_thinking": False}),
        shape(messages=[U], chat_template_kwargs={"enable_thinking": True}),
        shape(messages=[U], add_generation_prompt=False),
        shape(messages=[U], response_format={"type": "json_object"}),
        shape(messages=[U | {"content": [{"type": "text", "text": "a"}]}]),
        shape(messages=[U, calls("{}")]),
        shape(prompt="a"),
        shape(prompt="a", add_special_tokens=False),
    ]
    assert len({one, *others}) == len(others) + 1
    assert shape(prompt=[1, 2]) is None, "token ids need no template"
    assert shape(messages=[U], tools=[tool]) == shape(messages=[U], tools=[tool | {"extra": 1}], tool_choice="auto")


def test_the_name_of_a_shape_is_short() -> None:
    long = shape(messages=[U | {"role": f"role {n}" * 50} for n in range(100)])
    assert long is not None and len(long) < 500
    asked._remembered.cache_clear()
    assert long == shape(messages=[U | {"role": f"role {n}" * 50} for n in range(100)])
    assert asked._remembered.cache_info().currsize == 0, "what clients make long is not remembered"
    assert long != shape(messages=[U | {"role": f"role {n}" * 50} for n in range(99)])


def test_a_question_to_the_tokenize_route_says_what_it_does_not_cover() -> None:
    body = {
        "model": "m",
        "messages": [U, {"role": "assistant", "content": "a", "reasoning_content": "t"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "temperature": 0,
    }
    asked = ENGINE.tokenized("chat", json.dumps(body).encode())
    assert asked is not None and asked.unseen == "tool_choice"
    sent = json.loads(asked.body)
    assert sent.keys() == {"model", "messages", "tools"} and sent["messages"][1]["reasoning"] == "t"
    effort = ENGINE.tokenized("chat", json.dumps({"messages": [U], "reasoning_effort": "none"}).encode())
    assert effort is not None and effort.unseen == "reasoning_effort"
    assert json.loads(effort.body)["chat_template_kwargs"] == {"enable_thinking": False, "reasoning_effort": "none"}
    plain = ENGINE.tokenized("chat", json.dumps({"messages": [U], "tool_choice": "none"}).encode())
    assert plain is not None and plain.unseen is None
