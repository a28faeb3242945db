"""Finds special tokens in the text of messages, to refuse them."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from operator import itemgetter
from os.path import commonprefix
from typing import Any, Literal

from msgspec import Struct

from api.errors import ApiError, invalid
from api.prompts.templates import Conversation
from api.reading import read

SpecialTokensInText = Literal["parse", "refuse"]
MAX_NESTED = 50  # groups of a pattern
EDGE_FACTOR = 4
OF_CONVERSATION = {"messages": "messages", "tools": "tools", "chat_template_kwargs": "kwargs", "documents": "documents"}
SHOWN = ("refusal", "text", "content", "output", "thinking")  # keys of a message or a part, the last one first
CODE = "special_token_in_text"


class _Chat(Struct):
    """The fields of any API's chats that a template may show."""

    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    system: Any = None
    instructions: Any = None
    input: Any = None


class SpelledTokens:
    """Refuses conversations whose text spells one of a tokenizer's special tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = sorted(set(filter(None, tokens)))
        self._spelled = re.compile(_pattern(texts)) if texts else None
        # So much of a text can be a part of a token, even if it has another length once it is normalized.
        self._edge = EDGE_FACTOR * max(map(len, texts), default=0)

    def check(self, conversation: Conversation) -> None:
        for param, field in OF_CONVERSATION.items():
            self._check(param, getattr(conversation, field))

    def check_body(self, body: bytes) -> None:
        """Check a chat as its client wrote it, whether or not its prompt can be known here."""
        chat = read(body, _Chat)
        for param in _Chat.__struct_fields__:
            self._check(param, getattr(chat, param))

    def _check(self, param: str, value: Any) -> None:
        if self._spelled is None or not value:
            return
        # Templates and engines may join the texts of messages and parts, and leave images out. Where long texts meet,
        # only their ends matter, because each text by itself is searched anyway.
        edge = self._edge
        ends = (text if len(text) <= 2 * edge else f"{text[:edge]}\0{text[-edge:]}" for text in _shown(value))
        for text in chain(_texts(value), ("".join(ends),)):
            found = self._spelled.search(text)
            if found is None and not text.isascii():  # a tokenizer may look for its tokens in the normalized text
                found = self._spelled.search(unicodedata.normalize("NFKC", text))
            if found is not None:
                why = "which this server does not take in text; write it otherwise"
                raise invalid(f"{param} spells the special token {found[0]!r}, {why}", param, CODE)


def is_refusal(error: ApiError) -> bool:
    return error.code == CODE


def _pattern(texts: list[str], depth: int = 0) -> str:
    """A pattern for the longest of the texts. Common prefixes are matched once: there may be thousands."""
    if depth == MAX_NESTED:
        return "(?:" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")"
    prefix = commonprefix(texts)  # noqa: RUF071  # texts are no paths
    rest = [text[len(prefix) :] for text in texts]
    groups = [_pattern(list(group), depth + 1) for _, group in groupby(filter(None, rest), itemgetter(0))]
    if not groups:
        return re.escape(prefix)
    return f"{re.escape(prefix)}(?:{'|'.join(groups)}){'?' if '' in rest else ''}"


def _shown(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            pending += [each[field] for field in SHOWN if field in each]
        elif isinstance(each, list):
            pending += reversed(each)


def _texts(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            pending += each
            pending += each.values()
        elif isinstance(each, list):
            pending += each
