"""The ends of the beginnings that a client asks to keep."""

import json
from typing import Any

import pytest

from api.errors import ApiError
from api.generation_apis import CHAT, MESSAGES, RESPONSES
from api.openai.requests import ChatRequest
from api.prompts.prompts import Prompts
from api.retention import DAY_S, END, tokens_within
from api.tokens.tokenizer import ByteTokenizer, Tokenizer

FIVE_MINUTES: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
AN_HOUR: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TEMPLATE = """{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor -%}
{%- for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% for call in m.tool_calls or [] -%}
{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}</>{% endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def message(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def kept(fields: dict[str, Any], prompts: Prompts, api: Any = MESSAGES) -> list[tuple[str, float]]:
    """The text of each beginning that is kept, and its time."""
    usual = {"model": "m", "max_tokens": 9} | fields
    request, _ = api.read(json.dumps(usual).encode())
    assert isinstance(request, ChatRequest)
    token_ids = prompts.chat(request)
    return [
        (prompts.tokenizer.decode(token_ids[: retain.tokens], skip_special_tokens=False), retain.ttl_s)
        for retain in prompts.retained(request, token_ids)
    ]


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(ByteTokenizer(), TEMPLATE)


def test_a_system_prompt_is_kept_up_to_its_end(prompts: Prompts) -> None:
    fields = {"system": [text("Be brief. ", **FIVE_MINUTES)], "messages": [message("user", text("hi"))]}
    assert kept(fields, prompts) == [("<system>Be brief.", 300)]


def test_a_part_of_a_message_is_kept_without_what_follows(prompts: Prompts) -> None:
    fields = {
        "messages": [message("user", text("a book", **AN_HOUR), text("a question")), message("assistant", text("x"))]
    }
    assert kept(fields, prompts) == [("<user>a book", 3600)]


def test_of_several_breakpoints_the_last_of_each_time_counts(prompts: Prompts) -> None:
    turns = [message("user", text(word, **FIVE_MINUTES)) for word in ("one", "two")]
    fields = {"system": [text("rules", **AN_HOUR)], "messages": turns}
    assert kept(fields, prompts) == [("<system>rules", 3600), ("<system>rules</><user>one</><user>two", 300)]


def test_a_longer_time_covers_what_stands_before(prompts: Prompts) -> None:
    fields = {"system": [text("rules", **FIVE_MINUTES)], "messages": [message("user", text("one", **AN_HOUR))]}
    assert kept(fields, prompts) == [("<system>rules</><user>one", 3600)]


def test_tools_are_kept_up_to_the_marked_one(prompts: Prompts) -> None:
    tools: list[dict[str, Any]] = [{"name": name, "input_schema": {}} for name in ("add", "sub", "mul")]
    tools[1] |= FIVE_MINUTES
    # The template's own text after it is the same, too.
    assert kept({"tools": tools, "messages": [message("user", text("hi"))]}, prompts) == [("[add][sub][", 300)]


def test_calls_and_their_results_are_kept(prompts: Prompts) -> None:
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "2"}
    asked = message("user", text("1 + 1"))
    tools = [{"name": "add", "input_schema": {}}]
    before = "[add]<user>1 + 1</><assistant>add"
    messages = [asked, message("assistant", call | FIVE_MINUTES), message("user", result)]
    assert kept({"tools": tools, "messages": messages}, prompts) == [(before + '{"a": 1', 300)]
    messages = [asked, message("assistant", call), message("user", result | FIVE_MINUTES, text("and now?"))]
    assert kept({"tools": tools, "messages": messages}, prompts) == [(before + '{"a": 1}</><tool>2', 300)]


def test_a_text_before_a_result_is_not_taken_for_all_that_stands_before_it(prompts: Prompts) -> None:
    """The results come first in a chat."""
    call = message("assistant", {"type": "tool_use", "id": "c", "name": "add", "input": {}})
    result = {"type": "tool_result", "tool_use_id": "c", "content": "2"}
    assert kept({"messages": [call, message("user", text("so", **FIVE_MINUTES), result)]}, prompts) == []


def test_a_control_beside_the_messages_keeps_all_of_them(prompts: Prompts) -> None:
    fields = {"messages": [message("user", text("one")), message("user", text("two"))], **FIVE_MINUTES}
    assert kept(fields, prompts) == [("<user>one</><user>two", 300)]


def test_what_a_template_does_not_show_keeps_nothing() -> None:
    hides = Prompts(
        ByteTokenizer(), "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert kept({"system": [text("rules", **AN_HOUR)], "messages": [message("user", text("hi"))]}, hides) == []


def test_what_a_template_refuses_keeps_nothing() -> None:
    refuses = "{% if tools | length > 1 %}{{ raise_exception('one tool') }}{% endif %}{{ messages[0].content }}"
    tools = [{"name": "add", "input_schema": {}} | FIVE_MINUTES]
    assert kept({"tools": tools, "messages": [message("user", text("hi"))]}, Prompts(ByteTokenizer(), refuses)) == []


def test_bytes_without_a_template_are_kept_as_well() -> None:
    fields = {"messages": [message("user", text("one", **FIVE_MINUTES), text("two"))]}
    assert kept(fields, Prompts(ByteTokenizer())) == [("<|im_start|>user\none", 300)]


def test_chats_have_the_same_marks(prompts: Prompts) -> None:
    parts = [text("a book", **AN_HOUR), text("a question")]
    assert kept({"messages": [message("user", *parts)]}, prompts, CHAT) == [("<user>a book", 3600)]
    tool = {"type": "function", "function": {"name": "add"}} | FIVE_MINUTES
    fields = {"tools": [tool], "messages": [{"role": "user", "content": "hi"}]}
    assert kept(fields, prompts, CHAT) == [("[add]", 300)]


def test_templates_do_not_see_marks() -> None:
    shows_all = Prompts(ByteTokenizer(), "{{ tools | tojson }}{{ messages | tojson }}")
    tool = {"type": "function", "function": {"name": "add"}} | FIVE_MINUTES
    marked = {
        "model": "m",
        "messages": [{"role": "user", "content": [text("x", **AN_HOUR)]} | AN_HOUR],
        "tools": [tool],
    }
    request, _ = CHAT.read(json.dumps(marked).encode())
    assert isinstance(request, ChatRequest)
    assert "cache_control" not in shows_all.render(request)


@pytest.mark.parametrize("api", [CHAT, RESPONSES])
def test_a_day_is_for_the_whole_prompt(api: Any, prompts: Prompts) -> None:
    fields = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_output_tokens": 9}
    assert kept(fields | {"prompt_cache_retention": "24h"}, prompts, api) == [("<user>hi</><assistant>", DAY_S)]
    assert kept(fields | {"prompt_cache_retention": "in_memory"}, prompts, api) == []


def test_another_time_is_refused_by_name(prompts: Prompts) -> None:
    control = {"cache_control": {"type": "ephemeral", "ttl": "2h"}}
    with pytest.raises(ApiError, match=r"cache_control\.ttl"):
        kept({"messages": [message("user", text("hi", **control))]}, prompts)


def test_tokens_never_reach_beyond_the_text(tokenizer: Tokenizer) -> None:
    """`tokenizer` is of each kind in turn."""
    whole = "The quick the fox é 東 the a the"
    token_ids = tokenizer.encode(whole, add_special_tokens=False)
    if tokenizer.decode(token_ids, skip_special_tokens=False).strip() != whole:
        pytest.skip("it has no tokens for all of the text")
    for end in range(len(whole) + 1):
        count = tokens_within(tokenizer, token_ids, whole[:end] + END)
        said = tokenizer.decode(token_ids[:count], skip_special_tokens=False)
        assert whole[:end].strip().startswith(said.strip())
    assert tokens_within(tokenizer, token_ids, whole + END) == len(token_ids)
