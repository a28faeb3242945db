"""JSON that says the same and is written differently: keys in another order."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lab.analysis.breaks.finding import Fault
from lab.analysis.breaks.prompts import Piece, Prompt

KEY_ORDER = Fault(
    "JSON with its keys in another order",
    "Write JSON with sorted keys and the same separators every time (json.dumps(..., sort_keys=True)).",
)
MOST_TRIES = 64  # braces of one text that begin no JSON
SHORTEST = 24  # letters

_decoder = json.JSONDecoder()


class Document(NamedTuple):
    start: int
    stop: int
    meaning: str


def with_one_key_order(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Replace every way of writing a document by the first one."""
    texts = {piece.text for prompt in prompts for piece in (*prompt.leading, *prompt.rest)}
    texts.update(tool for prompt in prompts for tool in prompt.tools)
    found = {text: documents for text in texts if "{" in text and (documents := list(_documents(text)))}
    forms: defaultdict[str, set[str]] = defaultdict(set)
    for text, documents in found.items():
        for document in documents:
            forms[document.meaning].add(text[document.start : document.stop])
    chosen = {meaning: min(ways) for meaning, ways in forms.items() if len(ways) > 1}
    if not chosen:
        return list(prompts)
    rewritten = {text: _rewritten(text, documents, chosen) for text, documents in found.items()}

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


def _documents(text: str) -> Iterator[Document]:
    """The outermost objects in a text."""
    at, tries = text.find("{"), 0
    while at >= 0 and tries < MOST_TRIES:
        try:
            value, stop = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            tries += 1
            stop = at + 1
        else:
            if stop - at >= SHORTEST and _has_order(value):
                yield Document(at, stop, json.dumps(value, sort_keys=True))
        at = text.find("{", stop)


def _has_order(value: object) -> bool:
    if isinstance(value, dict):
        return len(value) > 1 or any(map(_has_order, value.values()))
    return isinstance(value, list) and any(map(_has_order, value))


def _rewritten(text: str, documents: Sequence[Document], chosen: dict[str, str]) -> str:
    parts, end = [], 0
    for document in documents:
        parts += [text[end : document.start], chosen.get(document.meaning, text[document.start : document.stop])]
        end = document.stop
    return "".join([*parts, text[end:]])
