"""Checks that our tokenizer is the replica's: the requests for its `POST /tokenize`, and the verdict on its answers."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from api.errors import ApiError
from api.native import unpack_ids
from api.openai.engine_requests import TokenizeRequest
from api.openai.requests import read
from api.prompts.prompts import Prompts
from engines.profile import PromptBuilder
from events.blocks import pack_tokens
from router.prompts.pictures import MARK
from router.prompts.prompt import UNREADABLE

_TEXT = "The naïve fox's 12345 jumps…\n\n  def f(x):\treturn {'a': [1, 2]}  # 東京 👩‍👧 ﬁ\r\n"
_SYSTEM = {"role": "system", "content": "You are terse.  Answer in one line.\n"}
_USER = {"role": "user", "content": _TEXT}
_ASSISTANT = {"role": "assistant", "content": "Why <b>?\n\n1. é"}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]}
_LONG = [_USER, _ASSISTANT] * 4
_CONVERSATIONS: Sequence[dict[str, Any]] = (  # these verify usual conversations from the start
    {"messages": [_USER]},
    {"messages": [_SYSTEM, _USER, _ASSISTANT, _USER]},
    {"messages": [_PARTS]},
    {"messages": [_SYSTEM, _USER]},
    {"messages": [_USER, _ASSISTANT, _USER]},
)
_LOCAL: Sequence[dict[str, Any]] = (
    *_CONVERSATIONS,
    {"messages": [*_LONG, _USER]},
    {"messages": [_USER, _ASSISTANT], "add_generation_prompt": False},
    {"messages": [_USER, {"role": "assistant", "content": " and"}], "continue_final_message": True},
)


class Probe(Struct, frozen=True):
    body: bytes
    expected: list[int]
    what: str
    shape: str | None = None  # the shape of a request with the same prompt, if shapes are verified
    dated_s: float | None = None  # the moment at which its template was asked for the date


class ProbeResult(Struct, frozen=True):
    """The result of a check; `verified` is None if the replica's answers do not tell."""

    verified: bool | None
    why: str


class _Features(Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[dict[str, Annotated[int, Meta(ge=0)]]]] = {}


class _Tokenized(Struct):
    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]] | None = None
    token_ids: list[Annotated[int, Meta(ge=0, lt=2**31)]] | None = None
    features: _Features | None = None  # pictures and the like


_decode = msgspec.json.Decoder(_Tokenized | list[_Tokenized]).decode


def probes(model: str, prompts: Prompts, engine: PromptBuilder | None = None) -> list[Probe]:
    """The requests with their expected tokens, without those that our template refuses.

    `engine`: the way in which the replica builds prompts; None: as ours do.
    """
    asked: list[dict[str, Any]] = [{"prompt": _TEXT}, {"prompt": _TEXT * 3, "add_special_tokens": False}]
    found = []
    for fields in ({"model": model, **one} for one in (*asked, *_CONVERSATIONS)):
        body, chat = msgspec.json.encode(fields), "messages" in fields
        shape = dated_s = None
        try:
            if engine is None:
                expected = prompts.tokenize(read(body, TokenizeRequest))
            else:
                made = engine.read("chat" if chat else "completions", body)
                shape, dated_s, [text] = made.shape, made.dated_s, made.texts
                encode = partial(prompts.tokenizer.encode, add_special_tokens=made.special_tokens)
                expected = text if isinstance(text, list) else encode(text)
        except ApiError:
            continue
        what = f"{len(fields['messages'])} messages" if chat else "a prompt"
        found.append(Probe(body, expected, what, shape, dated_s))
    return found


def verdict(asked: Sequence[Probe], answers: Iterable[tuple[int, bytes]]) -> ProbeResult:
    """Compare answers (status, body): False at the first difference, None if one is unusable, else True."""
    unknown = None
    for probe, (status, body) in zip(asked, answers, strict=True):
        found = token_ids_in(body) if status == 200 else None
        if found is None:
            unknown = unknown or f"POST /tokenize answers {status} to {probe.what}"
        elif found != probe.expected:
            pairs = enumerate(zip(probe.expected, found, strict=False))
            tokens = (f"token {i} is {theirs} there and {ours} here" for i, (ours, theirs) in pairs if ours != theirs)
            what = next(tokens, f"{len(found)} tokens there and {len(probe.expected)} here")
            return ProbeResult(False, f"{probe.what}: {what}")
    if unknown or not asked:
        return ProbeResult(None, unknown or "there is nothing to ask")
    return ProbeResult(True, f"{len(asked)} answers of POST /tokenize are as expected")


def told_in(body: bytes) -> list[tuple[bytes, list[list[bytes]]]]:
    """The prompts of an engine's answer, packed, with marks for pictures, and these with their names; none if odd."""
    told = []
    try:
        found = _decode(body)
        for one in found if isinstance(found, list) else [found]:
            ids, packed, pictures, end = one.tokens or one.token_ids or [], b"", list[list[bytes]](), 0
            places, names = (one.features.mm_placeholders, one.features.mm_hashes) if one.features else ({}, {})
            named = [pair for kind in names for pair in zip(places[kind], names[kind], strict=True)]
            for start, length, name in sorted((at["offset"], at["length"], name) for at, name in named):
                if not end <= start < start + length <= len(ids):
                    return []
                packed, end = packed + pack_tokens(ids[end:start]) + MARK, start + length
                pictures.append([pack_tokens(ids[start:end]), name.encode()])
            told.append((packed + pack_tokens(ids[end:]), pictures))
    except (*UNREADABLE, ValueError, KeyError):  # the latter are of features that do not belong together
        return []
    return told if all(packed for packed, _ in told) else []


def token_ids_in(body: bytes) -> list[int] | None:
    """The tokens of the first prompt; None if there are none, or more than tokens."""
    return next((unpack_ids(packed) for packed, pictures in told_in(body)[:1] if not pictures), None)


def conversations(prompts: Prompts) -> list[str]:
    """Sample conversations, rendered with the model's template."""
    shown = []
    for fields in _LOCAL:
        try:
            shown.append(prompts.render(msgspec.convert(fields, TokenizeRequest)))
        except ApiError:
            continue
    return shown
