import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from events.blocks import block_keys, pack_tokens, root_key
from router.prompts.prompt import (
    APPROXIMATE,
    APPROXIMATE_BLOCK_BYTES,
    Peek,
    Prompt,
    approximate,
    beginning_of,
    is_billed,
    read_peek,
    salted,
    text_of,
)
from tests.api.bodies import JSON, VALUES

USER = {"role": "user", "content": "hi"}


def peek(**fields: Any) -> Peek:
    return read_peek(json.dumps({"model": "m"} | fields).encode())


def chat(*contents: Any, **fields: Any) -> Peek:
    return peek(messages=[{"role": "user", "content": content} for content in contents], **fields)


def made(of: Peek, **named: str | None) -> Prompt:
    return approximate(named.get("model") or "m", of, named.get("lora"), named.get("salt"), "there is no tokenizer")


def shared(one: Prompt, other: Prompt) -> int:
    """Number of equal leading blocks."""
    pairs = zip(one.keys(APPROXIMATE), other.keys(APPROXIMATE), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.keys(0)), len(other.keys(0))))


# ---- reading


def test_what_the_router_needs_is_read_and_the_rest_is_not() -> None:
    read = peek(messages=[USER], stream=True, n=2, seed=7, cache_salt="s", prompt_cache_key="k", other={"a": 1})
    assert (read.model, read.stream, read.n, read.seed, read.cache_salt) == ("m", True, 2, 7, "s")
    assert read.prompt_cache_key == "k"


def test_odd_types_are_read_as_lenient_engines_read_them() -> None:
    read = peek(messages=[USER], stream="true", n="2", seed="x", cache_salt=5, prompt_cache_key=["u"], tools={"a": 1})
    assert (read.stream, read.n, read.seed, read.cache_salt) == (True, 2, None, None)
    assert read.prompt_cache_key is None and bytes(read.tools) == b'{"a":1}'
    assert read.messages is not None and read.messages[0].content == "hi"


@given(
    fields=st.dictionaries(
        st.sampled_from([name for name in Peek.__struct_fields__ if name != "model"]), st.sampled_from(VALUES) | JSON
    )
)
def test_no_field_but_the_model_is_refused(fields: dict[str, Any]) -> None:
    read = peek(**fields)
    prompt = made(read)
    assert prompt.tokens >= 1 and prompt.choices >= 1
    assert len(prompt.keys(APPROXIMATE)) == len(prompt.text) // APPROXIMATE_BLOCK_BYTES


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"hello", "not valid JSON"),
        (b'{"model": "m"', "not valid JSON"),
        (b"[1]", "the body is not a request: expected `object`, got `array`"),
        (b'{"messages": []}', "model is missing; it is required"),
        (b'{"model": 5}', "model is 5; expected `str`, got `int`"),
        (b'{"model": null, "n": "x"}', "model is null"),
        (b'{"model": "m\xff"}', "not UTF-8"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "not valid JSON"),
        (b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"model": "m", "other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"model": "m", "messages": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
    ],
)
def test_what_is_no_request_is_refused_by_name(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_peek(body)
    assert caught.value.status == 400 and message in caught.value.message


# ---- a salt


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "n": 1.50}',
        b'  {"model":"m","cache_salt":"theirs","n":1.50}\n',
        b'{"model": "m", "cache_salt": null, "n": 1.50}',
        b'{"model": "m", "cache\\u005fsalt": "theirs", "n": 1.50}',
        b'{"model": "m", "cache_salt": "one", "cache_salt": "two", "n": 1.50}',
        b'{"model": "m", "cache_salt": 7, "n": 1.50}',
    ],
)
def test_a_salt_takes_the_place_of_the_clients(body: bytes) -> None:
    changed = salted(body, read_peek(body), 'a"b')
    assert json.loads(changed) == {"model": "m", "cache_salt": 'a"b', "n": 1.5}
    assert b"1.50" in changed and read_peek(changed).cache_salt == 'a"b'


# ---- approximate prompts


def test_a_conversation_that_continues_begins_as_before() -> None:
    early = made(chat("x" * 1000, "y" * 1000))
    late = made(chat("x" * 1000, "y" * 1000, "z" * 500))
    assert shared(early, late) == len(early.keys(APPROXIMATE)) == 7
    assert early.approximate_block_tokens == 64 and not early.exact and early.keys(16) == []


def test_how_json_is_written_makes_no_difference() -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "naïve " * 200}], "n": 1}
    turned = {"messages": [{"content": "naïve " * 200, "role": "user"}], "n": 1, "model": "m"}
    bodies = (json.dumps(fields), json.dumps(turned), json.dumps(fields, ensure_ascii=False, indent=2))
    assert len({tuple(made(read_peek(body.encode())).keys(APPROXIMATE)) for body in bodies}) == 1


def test_parts_of_text_are_text_and_others_are_distinguished() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 1_000_000}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert text_of(chat(parts)) == text_of(chat("one\ntwo"))
    assert made(chat([image])).tokens < 10, "bytes were taken for tokens"
    assert text_of(chat([image])) != text_of(chat([image | {"image_url": {"url": "data:B"}}]))


def test_tools_and_calls_are_part_of_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "d" * 600}}
    with_tool, without = made(chat("x" * 600, tools=[tool])), made(chat("x" * 600))
    assert shared(with_tool, without) == 0
    assert shared(with_tool, made(chat("other" * 99, tools=[tool]))) == 2
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    assert text_of(peek(messages=[USER, call])) != text_of(peek(messages=[USER, call | {"tool_calls": []}]))


def test_models_adapters_and_salts_share_nothing() -> None:
    of = chat("x" * 1000)
    plain = made(of)
    for other in (made(of, model="n"), made(of, lora="a"), made(of, salt="s")):
        assert shared(plain, other) == 0
    assert shared(plain, made(of)) == 3


@pytest.mark.parametrize(
    ("prompt", "text", "choices"),
    [
        ("abc", b"abc", 1),
        (["abc", "def"], b"abc", 2),
        ([1, 2], pack_tokens([1, 2]), 1),
        ([[1, 2], [3]], pack_tokens([1, 2]), 2),
        ([-1], b"[-1]", 1),
        ([], b"[]", 1),
        (None, b"null", 1),
        ({"a": 1}, b'{"a":1}', 1),
    ],
)
def test_a_completions_first_prompt_counts(prompt: Any, text: bytes, choices: int) -> None:
    assert text_of(peek(prompt=prompt)) == text
    assert made(peek(prompt=prompt)).choices == choices
    assert made(peek(prompt=prompt, n=3)).choices == 3 * choices


# ---- exact prompts


def test_keys_are_those_of_the_events() -> None:
    ids = list(range(100))
    of = peek(prompt="x" * 1000)
    prompt = Prompt("m", 100, [pack_tokens(ids), pack_tokens([1])], True, None, 2, "a", "s", of)
    for size in (8, 16):
        assert prompt.keys(size) == block_keys(ids, size, root_key("m", "a", "s", size))
        assert prompt.keys(size) is prompt.keys(size)
    assert prompt.keys(APPROXIMATE) == made(of, lora="a", salt="s").keys(APPROXIMATE)
    assert prompt.approximate_block_tokens == pytest.approx(100 * APPROXIMATE_BLOCK_BYTES / 1000)


@pytest.mark.parametrize(
    ("fields", "chat", "skips"),
    [
        ({}, False, False),
        ({"prompt_logprobs": 0}, False, True),
        ({"prompt_logprobs": 2}, True, True),
        ({"echo": True}, False, False),
        ({"echo": True, "logprobs": 0}, False, True),
        ({"logprobs": 3}, False, False),
        ({"echo": True}, True, True),  # vLLM's chat asks for the top 0 log probabilities then
        ({"echo": False, "logprobs": True}, True, False),
        ({"echo": "false", "logprobs": 1}, False, False),
    ],
)
def test_requests_that_score_their_prompt_skip_the_cache(fields: dict[str, Any], chat: bool, skips: bool) -> None:
    assert peek(**fields).skips_cache(chat) is skips


def test_a_billing_line_does_not_part_the_texts_of_conversations() -> None:
    def text(*parts: str) -> bytes:
        content = [{"type": "text", "text": part} for part in parts]
        return text_of(peek(messages=[{"role": "system", "content": content}, {"role": "user", "content": "hi"}]))

    billed = [f"x-anthropic-billing-header: cch={number};" for number in range(2)]
    assert text(billed[0], "You are.") == text(billed[1], "You are.") == text("You are.")
    assert text(f"{billed[0]}\nYou are.") == text(f"{billed[1]}\nYou are.") == text("You are.")
    assert text("You are.", billed[0]) == text("You are.")
    assert text("You are. " + billed[0]) != text("You are. " + billed[1])


def test_a_billing_line_is_told_at_the_head_of_a_system_prompt_only() -> None:
    line = "x-anthropic-billing-header: cch=1;"
    for content in (line, f"{line}\nYou are.", [{"type": "text", "text": line}, {"type": "text", "text": "You are."}]):
        billed = peek(messages=[{"role": "system", "content": content}, {"role": "user", "content": "hi"}])
        assert is_billed(billed)
        assert is_billed(Peek("m", prompt=beginning_of(billed, 100).decode())), "where the body was read apart"
        assert not is_billed(peek(messages=[{"role": "user", "content": content}]))
    assert not is_billed(peek(messages=[{"role": "system", "content": "You are."}]))
    assert not is_billed(peek(messages=[])) and not is_billed(peek(prompt=line)) and not is_billed(peek(prompt=[1]))
