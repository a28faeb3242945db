"""The cases of vLLM's and Dynamo's own tests of these parsers, in other words: the same shapes of a model's text.

`DIFFERENT` are those where we mean to say something else than vLLM does.
"""

import json
from typing import Any, NamedTuple

import pytest

from tests.api.parsing.parsers import cut, parser_of, said


class Case(NamedTuple):
    format: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments
    content: str = ""


ADD = '{"a": 3.5, "b": 4}'
OSLO = '{"city": "Oslo", "unit": "C"}'
SEARCH = '{"query": "cats"}'
CALL = f'{{"name": "get_weather", "arguments": {OSLO}}}'
PARAMETERS = f'{{"name": "search", "parameters": {SEARCH}}}'
EMPTY = '{"name": "f", "parameters": {}}'
DEEP = '{"a": {"b": {"c": {"d": {"e": "deep"}}}}}'

CASES = {
    # vLLM: test_hermes_tool_parser
    "hermes-text": Case("hermes", "Nothing in here is a call.", content="Nothing in here is a call."),
    "hermes-between-tags": Case("hermes", f"<tool_call>\n{CALL}\n</tool_call>", (("get_weather", OSLO),)),
    "hermes-line-breaks": Case(
        "hermes", f'<tool_call>{{"name": "add",\n"arguments":\n{ADD}}}\n</tool_call>', (("add", ADD),)
    ),
    "hermes-until-the-end": Case("hermes", f"<tool_call>\n{CALL}", (("get_weather", OSLO),)),
    "hermes-content-first": Case(
        "hermes", f"Let me look that up.<tool_call>{CALL}</tool_call>", (("get_weather", OSLO),), "Let me look that up."
    ),
    "hermes-several": Case(
        "hermes",
        f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "add", "arguments": {ADD}}}</tool_call>',
        (("get_weather", OSLO), ("add", ADD)),
    ),
    "hermes-boolean": Case(
        "hermes", '<tool_call>\n{"name": "f", "arguments": {"on": true}}\n</tool_call>', (("f", '{"on": true}'),)
    ),
    "hermes-serialized-arguments": Case(
        "hermes", f'<tool_call>{{"name": "add", "arguments": {json.dumps(ADD)}}}</tool_call>', (("add", ADD),)
    ),
    # Dynamo: fixtures/hermes.rs
    "hermes-compact": Case("hermes", '<tool_call>{"name":"f","arguments":{"x":1}}\n</tool_call>', (("f", '{"x":1}'),)),
    "hermes-compact-without-end": Case("hermes", '<tool_call>{"name":"f","arguments":{"x":1}}\n', (("f", '{"x":1}'),)),
    # vLLM: test_llama3_json_tool_parser
    "llama-text": Case("llama3_json", "Only some words", content="Only some words"),
    "llama-arguments": Case("llama3_json", PARAMETERS, (("search", SEARCH),)),
    "llama-other-key": Case("llama3_json", f'{{"name": "search", "arguments": {SEARCH}}}', (("search", SEARCH),)),
    "llama-invalid": Case(
        "llama3_json", '{"name": "f", "parameters": {not json}', content='{"name": "f", "parameters": {not json}'
    ),
    "llama-several": Case(
        "llama3_json",
        f"{PARAMETERS}; {EMPTY}; {PARAMETERS}",
        (("search", SEARCH), ("f", "{}"), ("search", SEARCH)),
    ),
    "llama-spaces-between": Case("llama3_json", f"{PARAMETERS} ; {EMPTY}", (("search", SEARCH), ("f", "{}"))),
    "llama-semicolon-only": Case("llama3_json", f"{PARAMETERS};{EMPTY}", (("search", SEARCH), ("f", "{}"))),
    "llama-line-break-between": Case("llama3_json", f"{PARAMETERS}\n{EMPTY}", (("search", SEARCH), ("f", "{}"))),
    "llama-deep": Case("llama3_json", f'{{"name": "f", "parameters": {DEEP}}}', (("f", DEEP),)),
    "llama-brackets-in-strings": Case(
        "llama3_json",
        '{"name": "f", "parameters": {"q": "a {b} [c]", "n": {"i": "{d}"}}}',
        (("f", '{"q": "a {b} [c]", "n": {"i": "{d}"}}'),),
    ),
    "llama-quotes-in-strings": Case(
        "llama3_json",
        '{"name": "f", "parameters": {"q": "say \\"hi {you}\\""}}',
        (("f", '{"q": "say \\"hi {you}\\""}'),),
    ),
    "llama-no-name": Case("llama3_json", '{"parameters": {}}', content='{"parameters": {}}'),
    "llama-no-arguments": Case("llama3_json", '{"name": "f"}', content='{"name": "f"}'),
    # Dynamo: fixtures/llama3_json.rs
    "llama-tag": Case("llama3_json", f'<|python_tag|>{{"name":"add","arguments":{ADD}}}', (("add", ADD),)),
    # vLLM: test_mistral_tool_parser
    "mistral-text": Case("mistral", "Some plain text", content="Some plain text"),
    "mistral-list": Case("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments":{ADD}}}]', (("add", ADD),)),
    "mistral-spaces": Case("mistral", f'[TOOL_CALLS]  [ {{"name":"add" , "arguments" : {ADD} }} ]', (("add", ADD),)),
    "mistral-arguments-first": Case(
        "mistral", f'[TOOL_CALLS] [{{"arguments":{OSLO}, "name": "get_weather"}}]', (("get_weather", OSLO),)
    ),
    "mistral-name-in-arguments": Case(
        "mistral", '[TOOL_CALLS] [{"arguments":{"name": "Ada"}, "name": "f"}]', (("f", '{"name": "Ada"}'),)
    ),
    "mistral-several": Case(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}, {{"name": "get_weather", "arguments":{OSLO}}}]',
        (("add", ADD), ("get_weather", OSLO)),
    ),
    "mistral-content-first": Case(
        "mistral", f'Well[TOOL_CALLS] [{{"name": "add", "arguments":{ADD}}}]', (("add", ADD),), "Well"
    ),
    "mistral-11": Case("mistral", f"[TOOL_CALLS]get_weather{OSLO}", (("get_weather", OSLO),)),
    "mistral-11-several": Case(
        "mistral", f"[TOOL_CALLS]add{ADD}[TOOL_CALLS]get_weather{OSLO}", (("add", ADD), ("get_weather", OSLO))
    ),
    "mistral-11-content-first": Case("mistral", f"so{{so[TOOL_CALLS]add{ADD}", (("add", ADD),), "so{so"),
    "mistral-11-code": Case(
        "mistral",
        """[TOOL_CALLS]f{"command": "print(\\"hi\\")\\nre.compile(r'{}')"}""",
        (("f", """{"command": "print(\\"hi\\")\\nre.compile(r'{}')"}"""),),
    ),
    "mistral-11-cut-short": Case("mistral", '[TOOL_CALLS]f{"command": "print(', (("f", '{"command": "print('),)),
    # Dynamo: fixtures/mistral.rs
    "mistral-object": Case("mistral", f'[TOOL_CALLS]{{"name":"add","arguments":{ADD}}}[/TOOL_CALLS]', (("add", ADD),)),
    "mistral-object-without-end": Case("mistral", f'[TOOL_CALLS]{{"name":"add","arguments":{ADD}}}', (("add", ADD),)),
}

DIFFERENT = {
    # vLLM's whole answers drop what comes before or after calls, its streams do not. It is content here.
    "llama-content-around": Case(
        "llama3_json", f"I call {EMPTY} Shall I go on?", (("f", "{}"),), "I call Shall I go on?"
    ),
    "llama-brace-after": Case("llama3_json", f"{PARAMETERS} by {{search}}.", (("search", SEARCH),), " by {search}."),
    "llama-json-after": Case(
        "llama3_json", f'{PARAMETERS} with {{"query": "cats"}}', (("search", SEARCH),), ' with {"query": "cats"}'
    ),
    "mistral-text-after": Case(
        "mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments":{ADD}}}]\nand more', (("add", ADD),), "\nand more"
    ),
    # vLLM's whole answer takes this for text, its stream for a call. The arguments are complete.
    "hermes-unclosed": Case("hermes", f'<tool_call>\n{{"name": "add", "arguments": {ADD}', (("add", ADD),)),
    # vLLM makes a call of it whose arguments are a string.
    "hermes-string-arguments": Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>',
        content='<tool_call>{"name": "f", "arguments": "hello"}</tool_call>',
    ),
    # vLLM searches for the list behind the other words, and drops the marker.
    "mistral-junk": Case(
        "mistral",
        f'[TOOL_CALLS]  so [{{"name": "add", "arguments":{ADD}}}]',
        content=f'[TOOL_CALLS]  so [{{"name": "add", "arguments":{ADD}}}]',
    ),
    "mistral-no-json": Case("mistral", "[TOOL_CALLS] not json", content="[TOOL_CALLS] not json"),
    "mistral-11-no-arguments": Case("mistral", "[TOOL_CALLS]f", content="[TOOL_CALLS]f"),
}


@pytest.mark.parametrize("name", CASES | DIFFERENT)
@pytest.mark.parametrize("step", [1, 3, 7, 10_000])
def test_a_public_case_is_read(name: str, step: int) -> None:
    case: Case = (CASES | DIFFERENT)[name]
    parsed = said(parser_of(case.format), cut(case.text, range(0, len(case.text), step)))
    assert tuple((call.name, call.arguments) for call in parsed.calls) == case.calls
    assert parsed.content == case.content


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.calls])
def test_without_tools_or_with_none_wanted_a_call_is_text(name: str) -> None:
    case = CASES[name]
    for fields in ({"tool_choice": "none"}, {"names": ()}):
        fields_of_request: dict[str, Any] = fields
        assert said(parser_of(case.format, "think", **fields_of_request), [case.text]) == ("", case.text, ())
