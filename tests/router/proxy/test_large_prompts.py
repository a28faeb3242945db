"""Prompts made in a reading process are exact as far as the router has verified their shapes."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from api.prompts.prompts import Prompts
from router.members.members import ServedModel
from router.prompts.pictures import cut
from router.prompts.prompt import APPROXIMATE, Peek, Prompt, read_peek
from router.prompts.reading import process
from router.prompts.shapes import DIFFERS, NOT_YET, Difference
from router.prompts.tokens import Tokens
from router.proxy.reading import make_for, prompt_from
from tests.router.families import prompts

BODY = json.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "Say something about bees. " * 40}],
        "tools": [{"type": "function", "function": {"name": "look"}}],
    }
).encode()


@pytest.fixture
def ours(tmp_path: Path) -> Prompts:
    return prompts("qwen", tmp_path)


def read(tokens: Tokens, monkeypatch: pytest.MonkeyPatch, ours: Prompts, body: bytes = BODY) -> Prompt:
    """The prompt of a body by way of a reading process."""
    monkeypatch.setattr(process, "limit_memory", lambda _: None)
    monkeypatch.setattr(process, "load_tokenizer", lambda _: ours.tokenizer)
    monkeypatch.setattr(process, "Prompts", lambda *_: ours)
    model = ServedModel("m", None, tokens)
    apart: Any = process.take_apart(body)
    found = process.found_in(apart)
    reader = process.Process(io.BytesIO(), io.BytesIO())
    made = reader._made(body, apart, found, make_for(model, "chat", None))
    return prompt_from(made, model, Peek(**found.fields), None)


def test_a_large_prompt_is_that_of_the_event_loop(ours: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens("m", ours, strict=False, engine="vllm")
    here = tokens.draft("chat", BODY, read_peek(BODY)).finish()
    apart = read(tokens, monkeypatch, ours)
    for one in (here, apart):
        assert not one.exact and one.packed == [] and one.why_not == NOT_YET
    assert here.shape == apart.shape and here.unverified == apart.unverified is not None
    assert here.keys(APPROXIMATE) == apart.keys(APPROXIMATE) and here.tokens == apart.tokens
    assert here.reason == apart.reason == "shape"


def test_a_large_prompt_of_a_verified_shape_is_exact(ours: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens("m", ours, strict=False, engine="vllm")
    shape = read(tokens, monkeypatch, ours).shape
    assert shape is not None and tokens.shapes is not None
    tokens.shapes.verified(shape, "r0 #1", frozenset)
    known = read(tokens, monkeypatch, ours)
    assert known.exact and known.doubt is None
    assert known.packed == tokens.draft("chat", BODY, read_peek(BODY)).finish().packed
    tokens.shapes.differed(shape, "r1 #1", frozenset, Difference("r1", 0, "", ""), 0.0)
    differing = read(tokens, monkeypatch, ours)
    assert differing.why_not == DIFFERS and differing.reason == "shape"


def test_the_pictures_of_a_large_body_are_cut_out_for_an_engine_that_is_asked(
    ours: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()
    asked, unasked = (Tokens("m", None, strict=False, engine=name) for name in ("vllm", ""))
    assert read(asked, monkeypatch, ours, body).cut == cut("chat", body) is not None
    assert read(unasked, monkeypatch, ours, body).cut is read(asked, monkeypatch, ours).cut is None


def test_a_large_prompt_of_an_engine_that_says_nothing_is_not_called_exact(
    ours: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens("m", ours, strict=False, engine="vllm")
    assert tokens.shapes is not None
    tokens.shapes.unanswered("it answers 404", 0.0)
    silent = read(tokens, monkeypatch, ours)
    assert silent.exact and silent.doubt == "it answers 404"
    other = read(Tokens("m", ours, strict=False, engine="openai"), monkeypatch, ours)
    assert other.exact and other.doubt is not None, "its engine's way with chats is not followed"
    native = read(Tokens("m", ours), monkeypatch, ours)
    assert native.exact and native.doubt is None
