"""A request as its engine reads it, and the name of its shape: the parts of the chat template that it uses.

Two requests of one shape may differ only in what a template passes on: names, numbers and texts. Whatever a template
may branch on is in the name: who speaks after whom, the fields of messages, tools and calls, flags and arguments.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from msgspec import Struct
from xxhash import xxh3_64_hexdigest

from api.openai.requests import ChatRequest
from api.retention import Breakpoint

Text: TypeAlias = str | list[int]  # token ids need no encoding

MAX_SHAPE = 400  # characters of a name; a longer one is cut and numbered, so that it stays one shape
MAX_REMEMBERED = 1024  # names of usual shapes
MAX_TURNS, MAX_TURN = 64, 64  # pairs of turns, and characters of one, in a shape whose name is remembered
MAX_VALUE = 24  # characters of a template's argument; longer ones are texts, and only their type counts


class Asked(Struct):
    """A request's prompts, and what decides how they are encoded."""

    texts: Sequence[Text]
    choices: int = 1  # the choices of each prompt
    special_tokens: bool = False  # to be added around a text
    shape: str | None = None  # None: there is nothing to verify, as in a prompt of token ids
    doubt: str | None = None  # why its tokens are not called exact, for an engine whose prompts are not followed
    dated_s: float | None = None  # the moment at which its template was asked for the date; None: it shows none
    retaining: ChatRequest | None = None  # the request, if it asks to keep a beginning of its prompt
    ended: dict[Breakpoint, Text] = {}  # the end of each: a text that goes on otherwise from there


class Question(Struct, frozen=True):
    """A POST that asks for the tokens that the engine makes of a client's request."""

    body: bytes
    unseen: str | None = None  # the field that the answer does not cover, if there is one
    path: str = "/tokenize"


def chat_shape(
    api: str,
    turns: Sequence[str],
    tools: Iterable[str] | None,
    flags: Sequence[str],
    arguments: Mapping[str, Any] | None,
) -> str:
    """Name a chat's shape; `turns` describes each message, `tools` each tool."""
    followed = frozenset(zip(("", *turns), (*turns, ""), strict=True))
    given = frozenset(tools) if tools is not None else None
    with_arguments = tuple(sorted(map(_argument, arguments.items()))) if arguments else ()
    usual = len(followed) <= MAX_TURNS and all(len(turn) <= MAX_TURN for turn in (*set(turns), *with_arguments))
    return (_remembered if usual else _named)(api, followed, given, tuple(flags), with_arguments)


def _named(
    api: str,
    followed: frozenset[tuple[str, str]],
    tools: frozenset[str] | None,
    flags: tuple[str, ...],
    arguments: tuple[str, ...],
) -> str:
    parts = [api, ", ".join(f"{before or 'first'}>{after or 'last'}" for before, after in sorted(followed))]
    if tools is not None:
        parts.append(f"tools {' '.join(sorted(tools))}")
    parts += flags
    if arguments:
        parts.append(f"arguments {' '.join(arguments)}")
    name = "; ".join(parts)
    return (
        name
        if len(name) <= MAX_SHAPE
        else f"{name[:MAX_SHAPE]}... #{xxh3_64_hexdigest(name.encode('utf-8', 'surrogatepass'))}"
    )


_remembered = lru_cache(MAX_REMEMBERED)(_named)


def _argument(item: tuple[str, Any]) -> str:
    name, value = item
    if value is None or isinstance(value, bool | int | float):
        return f"{name}={value}"
    if isinstance(value, str) and len(value) <= MAX_VALUE:
        return f"{name}={value!r}"
    return f"{name}:{type(value).__name__}"
