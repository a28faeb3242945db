"""Scripted answers: one script for every API, through the real tokenizer, parsers, scheduler and cache."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from api.native import REQUEST_TYPE, Native, envelope, pack_ids
from api.openai.requests import ChatRequest
from api.tokens.tokenizer import ByteTokenizer
from replica.config import AnswerRule, SimulatedConfig
from replica.http.work import ScriptedAnswers
from replica.messages import Sampling
from replica.runners.request import Request
from tests.late import openai
from tests.replica.engines import chain
from tests.replica.runners.test_simulated import EOS, runner
from tests.replica.serving import MODEL, Replica, replica

CALL = '<tool_call>{"name": "write", "arguments": {"path": "a.txt", "text": "é"}}</tool_call>'
PATCH = '<tool_call>{"name": "files__patch", "arguments": {"input": "+é\\n\\ud83d\\ude00"}}</tool_call>'
ARGUMENTS = '{"path": "a.txt", "text": "é"}'
RULES = (
    AnswerRule(text=f"I write.\n{CALL}", tool="write", tool_results=0),
    AnswerRule(text=PATCH, tool="files__patch", tool_results=0),
    AnswerRule(text="It failed.", tool_results=1, last="Error"),
    AnswerRule(text="Done.", tool_results=1),
    AnswerRule(text='{"a": 1}', last="JSON"),
)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Replica]:
    with replica(http={"tool_call_parser": "hermes", "simulated_answers": RULES}) as running:
        yield running


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), **fields}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


TOOLS = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]


def test_a_chat_is_answered_by_a_call_and_then_by_its_result(scripted: Replica) -> None:
    first = scripted.post("/v1/chat/completions", chat(user("Write."), tools=TOOLS)).json
    [choice] = first["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I write.", "tool_calls")
    assert call["function"] == {"name": "write", "arguments": ARGUMENTS}
    assert first["usage"]["completion_tokens"] == len(RULES[0].text.encode()) + 1  # and the end
    for said, told in (("ok", "Done."), ("Error: no disk", "It failed.")):
        result = {"role": "tool", "tool_call_id": call["id"], "content": said}
        second = scripted.post(
            "/v1/chat/completions", chat(user("Write."), choice["message"], result, tools=TOOLS)
        ).json
        assert second["choices"][0]["message"]["content"] == told
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 16


def test_a_custom_tool_of_a_response_is_called_with_text(scripted: Replica) -> None:
    tools: list[Any] = [
        {"type": "web_search"},
        {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "custom", "name": "patch"}]},
    ]
    asked: dict[str, Any] = {"model": MODEL, "tools": tools}
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(**asked, input="Write.") as stream:
            events = list(stream)
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
        last = events[-1]
        assert last.type == "response.completed"
        [call] = last.response.output
        assert call.type == "custom_tool_call" and len(deltas) == 1
        assert (call.name, call.namespace, call.input) == ("patch", "files", "+é\n😀")
        assert "".join(deltas) == done.input == call.input and done.item_id == call.id
        result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        second = client.responses.create(**asked, previous_response_id=last.response.id, input=[result])
        assert second.output_text == "Done."


def test_text_is_made_up_where_no_rule_matches(scripted: Replica) -> None:
    scripts = {rule.text for rule in RULES}
    made_up = scripted.post("/v1/chat/completions", chat(user("Hello"), max_tokens=5)).json["choices"][0]
    assert made_up["message"]["content"] not in scripts
    completed = scripted.post("/v1/completions", {"model": MODEL, "prompt": "JSON", "max_tokens": 5}).json
    assert completed["choices"][0]["text"] not in scripts


def test_an_answer_with_a_form_follows_the_script_that_has_it(scripted: Replica) -> None:
    form = {"type": "json_object"}
    answer = scripted.post("/v1/chat/completions", chat(user("JSON, please"), response_format=form)).json
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'


def test_another_replica_goes_on_with_the_script(scripted: Replica) -> None:
    begun = [*RULES[0].text.encode()[:30]]
    native = Native(resume_token_ids=[pack_ids(begun)])
    body = envelope(native) + json.dumps(chat(user("Write."), tools=TOOLS)).encode()
    [choice] = scripted.post("/v1/chat/completions", body, **{"Content-Type": REQUEST_TYPE}).json["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


@pytest.mark.parametrize(
    ("rule", "matched"),
    [
        ({}, True),
        ({"tool": "write"}, True),
        ({"tool": "read"}, False),
        ({"last": "rite"}, True),
        ({"last": "Hello"}, False),  # an earlier message's
        ({"tool_results": 0}, True),
        ({"tool_results": 1}, False),
    ],
)
def test_a_rule_is_for_conversations_with_all_its_features(rule: dict[str, Any], matched: bool) -> None:
    request = msgspec.convert(chat(user("Hello"), user("Write"), tools=TOOLS), ChatRequest)
    answers = ScriptedAnswers([AnswerRule(text="x", **rule)], ByteTokenizer())
    assert answers.token_ids(request) == (pack_ids(b"x") if matched else b"")


def said(sampling: Sampling, count: int) -> list[int]:
    asked = Request(1, chain([1, 2]), 2, sampling, (0.0, 1))
    by = runner(SimulatedConfig(mean_output_tokens=2), eos=(EOS,))
    for _ in range(count):
        asked.chain.append(by.sample(asked).token)
    return list(asked.chain.tokens[2:])


def test_the_output_ends_with_its_script() -> None:
    script = pack_ids([7, 8, 9, 10, 11])
    assert said(Sampling(max_tokens=20, script=script), 6) == [7, 8, 9, 10, 11, EOS]
    longer = said(Sampling(max_tokens=20, script=script, min_tokens=8), 9)
    assert longer[:5] == [7, 8, 9, 10, 11] and longer.index(EOS) == 8
    assert EOS not in said(Sampling(max_tokens=20, script=script, ignore_eos=True), 20)
