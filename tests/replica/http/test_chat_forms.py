"""Chat answers with reasoning and calls, whole and streamed, from token to byte."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from api.native import Native, pack_ids
from api.openai.constraint_fields import NamedFunction, NamedTool
from api.openai.requests import ChatRequest, read
from api.parsing.formats import REASONING, AnswerFormats, answer_formats
from api.tokens.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer
from replica.http.forms import form_of
from replica.http.work import Served, plan
from tests.api.tokenizers import byte_level, saved

TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
FORMATS = AnswerFormats("hermes", REASONING["think"])
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWER = f"<think>Hm.</think>One moment.\n{CALL}"


def asked(**fields: Any) -> ChatRequest:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS} | fields
    return read(json.dumps(body).encode(), ChatRequest)


def answered(
    request: ChatRequest,
    texts: Sequence[str],
    *,
    formats: AnswerFormats = FORMATS,
    prompt: str = "x",
    resumed: int = 0,
    reason: str = "stop",
    tokenizer: Tokenizer | None = None,
) -> bytes:
    """The bytes for a client, if each choice says one of the texts token by token; `resumed` were said elsewhere."""
    tokenizer = tokenizer or ByteTokenizer()
    served = Served(4096, tokenizer, tokenizer.eos_token_ids, formats)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    native = Native(response_id="chatcmpl-1", created=1)
    native.resume_token_ids = [pack_ids(said[:resumed]) for said in ids] if resumed else []
    work = plan(request, native, [prompt_ids], served, itertools.count(1).__next__)
    form = form_of(work, "demo", tokenizer)
    shown = b""
    for part, said in zip(work.parts, ids, strict=True):
        form.begin(part.choice, 0)
        for token in said[resumed:]:
            shown += form.add(part.choice, part.choice.feed([token]))
        end = [tokenizer.eos_token_ids[0]] if reason == "stop" else [ord("!")]
        shown += form.add(part.choice, part.choice.feed(end, reason))
    return shown + form.end()


def whole(request: ChatRequest, *texts: str, **more: Any) -> list[Any]:
    choices: list[Any] = json.loads(answered(request, texts or [ANSWER], **more))["choices"]
    return choices


def streamed(request: ChatRequest, *texts: str, **more: Any) -> list[Any]:
    """The choices of all events, in order."""
    events = answered(request, texts or [ANSWER], **more).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(each.removeprefix("data: "))["choices"][0] for each in events[:-2]]


def joined(deltas: list[Any], field: str) -> str:
    return "".join(choice["delta"].get(field, "") for choice in deltas)


def call_deltas(deltas: list[Any]) -> list[Any]:
    return [delta for choice in deltas for delta in choice["delta"].get("tool_calls", [])]


def test_a_whole_answer_has_reasoning_content_and_calls() -> None:
    [choice] = whole(asked())
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Hm.", "Hm.", "One moment.")
    [call] = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    assert choice["finish_reason"] == "tool_calls"


def test_a_stream_says_a_calls_name_first_and_its_arguments_in_pieces() -> None:
    deltas = streamed(asked(stream=True))
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(deltas, "reasoning") == joined(deltas, "reasoning_content") == "Hm."
    assert joined(deltas, "content") == "One moment."
    first, *others = call_deltas(deltas)
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "get_weather")
    assert len(others) > 10 and all(set(delta) == {"index", "function"} for delta in others)
    assert all(set(delta["function"]) == {"arguments"} for delta in others)
    arguments = "".join(delta["function"]["arguments"] for delta in (first, *others))
    assert json.loads(arguments) == {"city": "Köln"}
    assert [choice["finish_reason"] for choice in deltas if choice["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_cut_short_says_so_although_it_calls(stream: bool) -> None:
    text = CALL[:60]
    if stream:
        deltas = streamed(asked(stream=True), text, reason="length")
        assert deltas[-1]["finish_reason"] == "length" and call_deltas(deltas)
    else:
        [choice] = whole(asked(), text, reason="length")
        assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"]


@pytest.mark.parametrize("text", [ANSWER, CALL * 2, "a <b", "<tool_call>{]", "<think>so"])
def test_a_stream_goes_on_on_another_replica_as_if_it_had_begun_there(text: str) -> None:
    request = asked(stream=True)
    tokens = len(text.encode())
    at_once = streamed(request, text)
    for cut in range(1, tokens, 3):
        events = streamed(asked(stream=True), text, resumed=cut)
        assert events == at_once[len(at_once) - len(events) :], cut
        assert not any("role" in choice["delta"] for choice in events)


def test_reasoning_may_begin_in_the_prompt() -> None:
    [choice] = whole(asked(), "Hm.</think>So.", prompt="Assistant:<think>\n")
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "So.")
    [choice] = whole(asked(), "So.", prompt="Assistant:<think>\n\n</think>\n\n")
    assert choice["message"]["content"] == "So."


@pytest.mark.parametrize("stream", [True, False])
def test_a_parser_sees_special_tokens_that_its_client_does_not(stream: bool, tmp_path: Path) -> None:
    tokenizer = byte_level()
    specials = ("[TOOL_CALLS]", "[ARGS]", "<|other|>", "</s>")
    tokenizer.add_tokens([AddedToken(text, special=True) for text in specials])
    loaded = HfTokenizer(saved(tokenizer, tmp_path, tokenizer_config={"eos_token": "</s>"}))
    formats = answer_formats(loaded, ["[TOOL_CALLS]"])
    text = 'so<|other|>[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'
    if stream:
        deltas = streamed(asked(stream=True), text, formats=formats, tokenizer=loaded)
        assert joined(deltas, "content") == "so"
        assert call_deltas(deltas)[0]["function"]["name"] == "get_weather"
    [choice] = whole(asked(), text, formats=formats, tokenizer=loaded)
    [call] = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], call["function"]["name"]) == ("so", "get_weather")
    [plain] = whole(asked(tools=[]), text, formats=formats, tokenizer=loaded)
    assert plain["message"]["content"] == 'soget_weather{"city": "Oslo"}'


def test_an_answer_for_a_function_that_the_client_named_ends_by_itself() -> None:
    request = asked()
    request.tool_choice = NamedTool(NamedFunction("get_weather"))
    [choice] = whole(request, '{"city": "Oslo"}')
    assert choice["finish_reason"] == "stop"  # as OpenAI has it
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
