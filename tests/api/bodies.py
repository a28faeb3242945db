"""Requests as clients might send them: right, nearly right, and wrong."""

from typing import Any

from hypothesis import strategies as st
from msgspec import Struct

from api.messages.requests import CountTokensRequest, MessagesRequest
from api.openai.engine_requests import (
    DetokenizeRequest,
    TokenizeRequest,
)
from api.openai.requests import ChatRequest, CompletionRequest
from api.openai_responses.requests import ResponsesRequest

# What is right for some field and wrong for others.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 17, 200, 2**31, 2**32, 2**63, -(2**63), 2**63 - 1, 10**30),
    *(0.5, -2.5, 1e-308),  # a schema counts 1.0 as an integer, so there is none here
    *("", "a", "none", "auto", "required", "text", "😀", "x" * 2000),
    *([], [""], ["a"], ["a", "b"], ["a"] * 17, ["a", 1], [1], [1, 2, -1], [[1]], [[1], [2]], [[]], [[1], "a"], [True]),
    *({}, {"1": 1}, {"1": 1000}, {"-1": 0}, {"a": 1}, {"10": None}, {"10000000000": 1}, {"-0": 1}, {"01": 1}),
    *({"type": "text"}, {"type": "json_object"}, {"include_usage": True}, {"include_usage": 1}),
    [{"role": "user", "content": "hi"}],
    [{"role": "user"}],
    [{"role": "assistant", "content": None}],
    [{"role": "developer", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "king", "content": "hi"}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    [{"type": "function", "function": {"name": 1}}],
    [{"type": "custom"}],
    ["text"],
    ["text", "audio"],
]
REQUIRED: dict[type[Struct], dict[str, Any]] = {
    CompletionRequest: {"model": "demo", "prompt": "Hello"},
    ChatRequest: {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]},
    MessagesRequest: {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]},
    CountTokensRequest: {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]},
    ResponsesRequest: {"model": "demo", "input": "Hello"},
    TokenizeRequest: {"prompt": "Hello"},
    DetokenizeRequest: {"tokens": [1, 2]},
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-9, 9).map(lambda i: i / 2 + 0.25) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def bodies(request_type: type[Struct], without: frozenset[str] = frozenset()) -> st.SearchStrategy[dict[str, Any]]:
    """Requests of this type with a few fields set to anything."""
    names = sorted(name for name in request_type.__struct_fields__ if name not in without)
    changes = st.dictionaries(
        st.sampled_from(names), st.sampled_from(VALUES) | st.sampled_from(VALUES) | JSON, max_size=3
    )
    return changes.map(lambda changed: REQUIRED[request_type] | changed)
