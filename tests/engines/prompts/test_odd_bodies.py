"""Whatever a client sends, reading it as an engine does ends with a prompt or with ApiError."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer
from engines.prompts.vllm import Vllm
from engines.vllm import PROFILE
from router.prompts.prompt import peek_of, text_of
from tests.api.chat_templates import TEMPLATES

ROLES = ("system", "developer", "user", "assistant", "tool")
KINDS = (
    *("text", "input_text", "output_text", "image_url", "tool_use"),
    *("tool_result", "thinking", "reasoning", "message"),
)
WORDS = st.sampled_from((*ROLES, *KINDS, "function", "function_call", "function_call_output", "{}", ""))
OUTER = (
    *("role", "content", "type", "text", "name", "tool_calls"),
    *("id", "call_id", "output", "input", "thinking", "status"),
)
INNER = ("function", "arguments", "tool_use_id", "summary", "reasoning", "parameters", "input_schema", "strict")
NAMES = st.sampled_from((*OUTER, *INNER))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**33) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        (
            *("messages", "input", "prompt", "system", "instructions", "tools", "tool_choice", "n", "stream", "text"),
            *("chat_template_kwargs", "thinking", "output_config", "reasoning", "documents", "reasoning_effort"),
        ),
        VALUES,
    ),
)
MESSAGE = st.fixed_dictionaries({"role": WORDS, "content": VALUES}, optional={"type": WORDS, "tool_calls": VALUES})
ENGINES = [Vllm(Prompts(ByteTokenizer(), source)) for source in (*TEMPLATES.values(), None)]


@pytest.mark.parametrize("api", ["chat", "completions", "messages", "responses"])
@given(fields=FIELDS, messages=st.lists(MESSAGE, max_size=4), engine=st.sampled_from(ENGINES), usual=st.booleans())
def test_nothing_else_is_raised(
    api: str, fields: dict[str, Any], messages: list[Any], engine: Vllm, usual: bool
) -> None:
    if usual:
        fields = fields | {"messages": messages, "input": messages}
    body = json.dumps(fields | {"model": "m"}).encode()
    assert PROFILE.question is not None
    for renders in (True, False):
        with suppress(msgspec.DecodeError):  # such a body is read before
            PROFILE.question(api, body, renders)
    try:
        asked = engine.read(api, body)
        assert asked.texts and all(isinstance(text, str | list) for text in asked.texts)
        engine.tokenized(api, body)
    except ApiError:
        pass
    if api in ("messages", "responses") and (peek := peek_of(api, body, "m")) is not None:
        assert isinstance(text_of(peek), bytes)
