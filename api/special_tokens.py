"""Finds special tokens in the text of messages, to refuse them."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix
from typing import Any, Literal

from api.errors import ApiError, invalid
from api.templates import Conversation

SpecialTokensInText = Literal["parse", "refuse"]
MOST_NESTED = 50  # groups of a pattern
CODE = "special_token_in_text"


class SpelledTokens:
    """Refuses conversations whose text spells one of a tokenizer's special tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = sorted(set(filter(None, tokens)))
        self._spelled = re.compile(_pattern(texts)) if texts else None

    def check(self, conversation: Conversation) -> None:
        if self._spelled is None:
            return
        for param in ("messages", "tools", "kwargs"):
            for text in _texts(getattr(conversation, param)):
                if found := _search(self._spelled, text):
                    name = "chat_template_kwargs" if param == "kwargs" else param
                    raise _refused(found[0], name)


def is_refusal(error: ApiError) -> bool:
    return error.code == CODE


def _refused(token: str, param: str) -> ApiError:
    message = f"{param} spells the special token {token!r}, which this server does not take in text; write it otherwise"
    return invalid(message, param, CODE)


def _pattern(texts: list[str], depth: int = 0) -> str:
    """A pattern for the longest of the texts. Common prefixes are matched once: there may be thousands."""
    if depth == MOST_NESTED:
        return "(?:" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")"
    prefix = commonprefix(texts)  # noqa: RUF071  # texts are no paths
    rest = [text[len(prefix) :] for text in texts]
    groups = [_pattern(list(group), depth + 1) for _, group in groupby(filter(None, rest), itemgetter(0))]
    if not groups:
        return re.escape(prefix)
    return f"{re.escape(prefix)}(?:{'|'.join(groups)}){'?' if '' in rest else ''}"


def _search(spelled: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = spelled.search(text)
    if found is None and not text.isascii():  # a tokenizer may look for its tokens in what it has normalized
        found = spelled.search(unicodedata.normalize("NFKC", text))
    return found


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
