"""Oddities of a request: its engine may treat it otherwise than others of its shape.

One client's odd request may have other tokens than expected. Then only requests with the same oddities lose their
exactness, and not everybody's of that shape. A difference in a plain request still counts for all of them.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from api.prompts.billing import BILLING_HEADER
from router.prompts.prompt import Peek

Oddities: TypeAlias = frozenset[str]

PLAIN: Oddities = frozenset()
LARGE: Oddities = frozenset(("large",))  # read in another process, so its texts are not known here
USUAL_FIELDS = frozenset(("type", "text", "id", "function", "name", "arguments", "role", "content"))
CHARACTERS = {
    "control characters": re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"),
    "unusual spaces": re.compile(r"[\xa0\xad\u1680\u2000-\u200b\u2028\u2029\u202f\u205f\u3000]"),
    "combining characters": re.compile(r"[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe00-\ufe2f]"),
    "invisible characters": re.compile(r"[\u061c\u180e\u200c-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff0-\uffff]"),
    "ligatures": re.compile(r"[\uf900-\ufaff\ufb00-\ufb4f]"),
    "private characters": re.compile(r"[\ud800-\uf8ff\U000e0000-\U0010ffff]"),
    "odd numbers": re.compile(r"\d[.eE][\d+-]|\d{16}"),
    "escapes": re.compile(r"\\[u\"\\/bfnrt]"),
    "braces": re.compile(r"\{[{%#]|[}%#]\}"),
}


def oddities(peek: Peek, special: Sequence[str], *, read_apart: bool) -> Oddities:
    """Return the oddities of a request; `special`: the texts of special tokens."""
    if read_apart:
        return LARGE
    texts, found = _texts(peek)
    whole = "\n".join(texts)
    found |= {name for name, pattern in CHARACTERS.items() if pattern.search(whole)}
    if any(token in whole for token in special):
        found.add("special tokens")
    if "" in texts:
        found.add("empty texts")
    if any(text != text.strip() for text in texts):
        found.add("spaces at an end")
    if BILLING_HEADER in whole:
        found.add("a billing line")
    return frozenset(found)


def _texts(peek: Peek) -> tuple[list[str], set[str]]:
    """All texts of a request, and oddities of the values around them."""
    texts, found = [bytes(peek.tools).decode(errors="replace")] if peek.tools else [], set[str]()
    messages = peek.messages or ()
    left: list[Any] = [peek.prompt, *(one.content for one in messages), *(one.tool_calls for one in messages)]
    while left:
        value = left.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            if not value.keys() <= USUAL_FIELDS:
                found.add("other fields")
            if None in value.values():
                found.add("null")
        elif isinstance(value, float):
            found.add("odd numbers")
    return texts, found
