"""Parsers for the tests, and what they say."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from api.openai.requests import ChatRequest, read
from api.parsing.answer import answer_parser
from api.parsing.formats import REASONING, AnswerFormats
from api.parsing.parsed import AnswerParser, Parsed, merged

NAMES = ("search", "get_weather", "register", "add", "f")


def chat(names: Sequence[str] = NAMES, **fields: Any) -> ChatRequest:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, **fields}
    return read(json.dumps(body).encode(), ChatRequest)


def parser_of(tools: str | None, reasoning: str = "", *, prompt_end: str = "", **fields: Any) -> AnswerParser:
    formats = AnswerFormats(tools, REASONING.get(reasoning))
    parser = answer_parser(chat(**fields), formats, "chatcmpl-1", 0, prompt_end=prompt_end)
    assert parser is not None
    return parser


def said(parser: AnswerParser, slices: Iterable[str]) -> Parsed:
    """Everything that the parser makes of a text."""
    whole = Parsed()
    for piece in slices:
        whole = merged(whole, parser.feed(piece))
    return merged(whole, parser.finish())


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    bounds = [0, *sorted({place for place in cuts if 0 < place < len(text)}), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def calls_in(parsed: Parsed) -> list[tuple[str | None, Any]]:
    """Names and decoded arguments."""
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]
