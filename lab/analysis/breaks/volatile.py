"""Header lines, times, ids and addresses near the beginning: text that is another in every request."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from lab.analysis.breaks.finding import Fault
from lab.analysis.breaks.headers import HEADER, LINE
from lab.analysis.breaks.prompts import Piece, Prompt

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
KINDS = {"header": HEADER, "address": ADDRESS, "time": TIMESTAMP, "id": IDENTIFIER}
ANY = re.compile("|".join(f"(?P<{name}>{'|'.join(patterns)})" for name, patterns in PATTERNS.items()))

SENTENCES = re.compile(r"((?<=[.!?]) |\n)")
MAY_MATCH = re.compile(r"[0-9@]|day\b")  # every match of ANY has one of these


class Part(NamedTuple):
    text: str
    kind: str | None = None  # of a value


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
        line = LINE.match(piece.text, endpos=EARLY)
        head, end = ([Part(line.group(), "header")], line.end()) if line is not None else ([], 0)
        sentences = SENTENCES.split(piece.text[end:EARLY])
        parts = [part for sentence in sentences for part in self._of_sentence(sentence)]
        return (*head, *parts, Part(piece.text[EARLY:]))


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
    return [_repaired(prompt, changed) for prompt in prompts]


def _early(prompt: Prompt) -> tuple[Piece, ...]:
    return (*prompt.leading, *prompt.rest[:1])


def _repaired(prompt: Prompt, changed: Mapping[Piece, Masked]) -> Prompt:
    early = _early(prompt)
    moved = [value for piece in early if piece in changed for value in changed[piece].values]
    if not moved:
        return prompt
    pieces = [changed[piece].piece if piece in changed else piece for piece in early]
    leading = len(prompt.leading)
    return prompt._replace(
        leading=tuple(pieces[:leading]),
        rest=(*pieces[leading:], *prompt.rest[1:]),
        moved=(*prompt.moved, *moved),
    )
