"""Common prefixes of texts, and the cost of prompts when every prefix is computed once."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from lab.analysis.breaks.prompts import Piece, Prompt

STRIDE = 512  # letters compared at once
BEFORE = 40  # letters shown before a difference
AFTER = 40


class Example(Struct, frozen=True):
    """Two texts where they part."""

    before: str
    one: str
    other: str


def example_of(one: str, other: str) -> Example:
    at = common(one, other)
    return Example(one[max(0, at - BEFORE) : at], one[at : at + AFTER], other[at : at + AFTER])


def common(one: str, other: str) -> int:
    """Letters that both begin with."""
    shorter, at = min(len(one), len(other)), 0
    while at < shorter and one[at : at + STRIDE] == other[at : at + STRIDE]:
        at += STRIDE
    if at >= shorter:
        return shorter
    step = STRIDE
    while step:
        if one[at : at + step] == other[at : at + step]:
            at += step
        step //= 2
    return min(at, shorter)


def common_end(texts: Iterable[str]) -> int:
    """Letters that all end with."""
    turned = [text[::-1] for text in texts]
    return common(min(turned), max(turned)) if turned else 0


def computed_letters(prompts: Iterable[Prompt]) -> int:
    """Letters computed for these prompts by a cache without an end: the size of the tree of their beginnings."""
    groups: defaultdict[tuple[str, str | None], set[tuple[Piece, ...]]] = defaultdict(set)
    for prompt in prompts:
        groups[prompt.model, prompt.salt].add(prompt.pieces)
    return sum(map(_tree_letters, groups.values()))


def _tree_letters(texts: Iterable[tuple[Piece, ...]]) -> int:
    """Sorted, each shares with the one before it all that it shares with any that comes earlier."""
    total, before = 0, tuple[Piece, ...]()
    for pieces in sorted(texts):
        total += sum(len(piece.text) for piece in pieces) - shared_letters(before, pieces)
        before = pieces
    return total


def shared_letters(one: Sequence[Piece], other: Sequence[Piece]) -> int:
    letters = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            return letters + (common(mine.text, yours.text) if mine.role == yours.role else 0)
        letters += len(mine.text)
    return letters


class Fault(Struct, frozen=True):
    name: str
    advice: str  # one sentence


class Finding(Struct, frozen=True):
    name: str
    requests: int
    lost_tokens: int
    example: Example
    request_ids: tuple[str, str]
    advice: str


class Loss(Struct, frozen=True):
    """Before tokens are known: letters that would not have to be computed."""

    fault: Fault
    requests: int
    letters: int
    example: Example
    request_ids: tuple[str, str]
