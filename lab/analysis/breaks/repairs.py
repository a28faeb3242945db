"""Repairs of the beginnings of prompts, each of one fault: what they then share is what the fault costs.

Times, ids and addresses are text that is another in every request.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple, TypeAlias

from lab.analysis.breaks.prompts import Example, Fault, Piece, Prompt

ORDER = Fault("tools in another order", "List the tools in one order every time, for example sorted by name.")
CHANGE = Fault(
    "tools that change",
    "Give every request of an application all of its tools, and say in the last message which to use.",
)
SALT = Fault(
    "a cache_salt for each request",
    "Give one cache_salt to all requests that may share, for example one for each tenant, or none.",
)
SHOWN = 8  # letters: a salt is a secret of a kind

Tools: TypeAlias = tuple[str, ...]


def with_one_tool_order(prompts: Sequence[Prompt]) -> list[Prompt]:
    """List each set of tools in its most frequent order."""
    orders: defaultdict[Tools, Counter[Tools]] = defaultdict(Counter)
    for prompt in prompts:
        orders[tuple(sorted(prompt.tools))][prompt.tools] += 1
    return [
        prompt._replace(tools=orders[tuple(sorted(prompt.tools))].most_common(1)[0][0]) if prompt.tools else prompt
        for prompt in prompts
    ]


def with_all_tools(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Every request with tools has those of all that begin like it."""
    together: defaultdict[tuple[str, tuple[Piece, ...]], dict[str, None]] = defaultdict(dict)
    for prompt in prompts:
        together[prompt.model, prompt.leading].update(dict.fromkeys(prompt.tools))
    return [
        prompt._replace(tools=tuple(together[prompt.model, prompt.leading])) if prompt.tools else prompt
        for prompt in prompts
    ]


def without_lone_salts(prompts: Sequence[Prompt]) -> list[Prompt]:
    users = {(prompt.salt, prompt.request_id) for prompt in prompts if prompt.salt is not None}
    lone: set[str | None] = {salt for salt, count in Counter(salt for salt, _ in users).items() if count == 1}
    if len(lone) < 2:  # a single such salt parts nothing
        return list(prompts)
    return [prompt._replace(salt=None) if prompt.salt in lone else prompt for prompt in prompts]


def salts_example(one: Prompt, other: Prompt) -> Example:
    return Example("cache_salt ", _shown(one), _shown(other))


def _shown(prompt: Prompt) -> str:
    salt = prompt.salt or ""
    return salt[:SHOWN] + "..." * (len(salt) > SHOWN)


KEY_ORDER = Fault(
    "JSON with its keys in another order",
    "Write JSON with sorted keys and the same separators every time (json.dumps(..., sort_keys=True)).",
)
MAX_TRIES = 64  # braces of one text that begin no JSON
SHORTEST = 24  # letters

_decoder = json.JSONDecoder()


class Part(NamedTuple):
    """Part of a text: a document with its meaning, or a value with its kind; other text has neither."""

    text: str
    kind: str | None = None


def with_one_key_order(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Replace every way of writing a document by the first one."""
    texts = {piece.text for prompt in prompts for piece in (*prompt.leading, *prompt.rest)}
    texts.update(tool for prompt in prompts for tool in prompt.tools)
    found = {text: parts for text in texts if len(parts := list(_with_documents(text))) > 1}
    forms: defaultdict[str, set[str]] = defaultdict(set)
    for part in chain.from_iterable(found.values()):
        if part.kind is not None:
            forms[part.kind].add(part.text)
    chosen: dict[str | None, str] = {meaning: min(ways) for meaning, ways in forms.items() if len(ways) > 1}
    if not chosen:
        return list(prompts)
    rewritten = {text: "".join(chosen.get(part.kind, part.text) for part in parts) for text, parts in found.items()}

    def repaired(piece: Piece) -> Piece:
        return Piece(piece.role, rewritten.get(piece.text, piece.text))

    return [
        prompt._replace(
            leading=tuple(map(repaired, prompt.leading)),
            tools=tuple(rewritten.get(tool, tool) for tool in prompt.tools),
            rest=tuple(map(repaired, prompt.rest)),
        )
        for prompt in prompts
    ]


def _with_documents(text: str) -> Iterator[Part]:
    """Yield a text in parts, of which the outermost objects are documents."""
    at, tries, end = text.find("{"), 0, 0
    while at >= 0 and tries < MAX_TRIES:
        try:
            value, stop = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            tries += 1
            stop = at + 1
        else:
            if stop - at >= SHORTEST and _has_order(value):
                yield Part(text[end:at])
                yield Part(text[at:stop], json.dumps(value, sort_keys=True))
                end = stop
        at = text.find("{", stop)
    yield Part(text[end:])


def _has_order(value: object) -> bool:
    if isinstance(value, dict):
        return len(value) > 1 or any(map(_has_order, value.values()))
    return isinstance(value, list) and any(map(_has_order, value))


TIMESTAMP = Fault(
    "timestamp early in the prompt",
    "Move the time to the end of the prompt, or give only the date, so that all before it stays the same.",
)
IDENTIFIER = Fault(
    "id early in the prompt",
    "Leave request and session ids out of the prompt, or put them after everything that is always the same.",
)
ADDRESS = Fault(
    "user data early in the prompt",
    "Put what is about one user after everything that is the same for all, for example into the user's message.",
)

EARLY = 16_384  # letters of a message

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
_TIMES = (
    r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?)?(?: ?(?:Z|UTC|[+-]\d{2}:?\d{2}))?\b",
    r"\b\d{1,2}[./]\d{1,2}[./]\d{4}\b",
    rf"\b{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?\b",
    rf"\b\d{{1,2}}(?:st|nd|rd|th)?\.? {_MONTH}(?:,? \d{{4}})?\b",
    r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b",
    rf"\b{_CLOCK}",
    r"\b1\d{9}(?:\d{3})?(?:\.\d+)?\b",  # seconds or milliseconds since 1970
)
_IDS = (
    r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b",
    r"\b\d{6,}\b",
    r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b",
    r"\b(?=[A-Za-z_-]{0,64}\d)(?=[0-9_-]{0,64}[A-Za-z])[A-Za-z0-9_-]{12,}\b",
)
_ADDRESSES = (r"\b[\w.+-]{1,64}@[\w-]+\.[\w.-]+\b",)
PATTERNS = {"address": _ADDRESSES, "time": _TIMES, "id": _IDS}
KINDS = {"address": ADDRESS, "time": TIMESTAMP, "id": IDENTIFIER}
ANY = re.compile("|".join(f"(?P<{name}>{'|'.join(patterns)})" for name, patterns in PATTERNS.items()))

SENTENCES = re.compile(r"((?<=[.!?]) |\n)")
MAY_MATCH = re.compile(r"[0-9@]|day\b")  # every match of ANY has one of these


class Masked(NamedTuple):
    """A text with values replaced by the names of their kinds."""

    piece: Piece
    values: tuple[str, ...]


class Values:
    """Remembers messages and sentences: most of them are in many prompts."""

    def __init__(self) -> None:
        self._of_sentence = cache(lambda sentence: tuple(_parts(sentence)))
        self._of_piece = cache(self._parts)

    def masked(self, piece: Piece, kinds: Collection[str]) -> Masked:
        parts = self._of_piece(piece)
        values = tuple(part.text for part in parts if part.kind in kinds)
        if not values:
            return Masked(piece, ())
        text = "".join(f"<{part.kind}>" if part.kind in kinds else part.text for part in parts)
        return Masked(Piece(piece.role, text), values)

    def _parts(self, piece: Piece) -> tuple[Part, ...]:
        parts = [part for sentence in SENTENCES.split(piece.text[:EARLY]) for part in self._of_sentence(sentence)]
        return (*parts, Part(piece.text[EARLY:]))


def _parts(sentence: str) -> Iterator[Part]:
    end = 0
    if MAY_MATCH.search(sentence):
        for match in ANY.finditer(sentence):
            yield Part(sentence[end : match.start()])
            yield Part(match.group(), match.lastgroup)
            end = match.end()
    yield Part(sentence[end:])


def without_volatile(prompts: Sequence[Prompt], faults: Collection[Fault], values: Values) -> list[Prompt]:
    """Move values to the end, out of beginnings that differ only in such values."""
    kinds = frozenset(name for name, fault in KINDS.items() if fault in faults)
    masks = {piece: values.masked(piece, kinds) for prompt in prompts for piece in _early(prompt)}
    alike: defaultdict[Piece, set[Piece]] = defaultdict(set)
    for piece, masked in masks.items():
        alike[masked.piece].add(piece)
    changed = {piece: masked for piece, masked in masks.items() if len(alike[masked.piece]) > 1}
    repaired = []
    for prompt in prompts:
        early, leading = _early(prompt), len(prompt.leading)
        moved = [value for piece in early if piece in changed for value in changed[piece].values]
        if not moved:
            repaired.append(prompt)
            continue
        pieces = [changed[piece].piece if piece in changed else piece for piece in early]
        rest = (*pieces[leading:], *prompt.rest[1:])
        repaired.append(prompt._replace(leading=tuple(pieces[:leading]), rest=rest, moved=(*prompt.moved, *moved)))
    return repaired


def _early(prompt: Prompt) -> tuple[Piece, ...]:
    return (*prompt.leading, *prompt.rest[:1])


REPAIRS: dict[Fault, Callable[[Sequence[Prompt]], list[Prompt]]] = {
    SALT: without_lone_salts,
    KEY_ORDER: with_one_key_order,
    ORDER: with_one_tool_order,
}
VOLATILE = (TIMESTAMP, IDENTIFIER, ADDRESS)
