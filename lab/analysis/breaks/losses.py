"""Losses after the beginnings: a changed history, and text that is the same in all prompts and comes late.

All after the first change of a conversation is computed again.

Constant text that comes after text that differs cannot be shared. Prompts that agree up to a message are compared in
that message, and only in the first ones of a conversation. Prompts are of a kind when they have all of that in common,
or also how the message begins or how it ends. What nearly all of a sample of a kind say is constant. Documents that
some prompts have in common are not: nobody can put them first.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple, TypeAlias

from lab.analysis.breaks.prompts import Fault, Loss, Piece, Prompt, common, common_end, example_of
from lab.analysis.breaks.repairs import ADDRESS

HISTORY = Fault(
    "history changed or cut",
    "Only append to a conversation; where it must be cut, cut much at once and seldom, and after the system prompt.",
)
LEAST_LETTERS = 20  # kept of what went before; less may be chance
LEAST_MESSAGES = 2  # kept, where nothing else says that it is one conversation


def changed_history(prompts: Sequence[Prompt]) -> Loss | None:
    """Find conversations that change or cut earlier messages, and the tokens that they recompute."""
    whole: set[int] = set()  # hashes of everything after the system prompt
    by_end: dict[tuple[str, Piece], Prompt] = {}
    by_session: dict[tuple[str, str | None], Prompt] = {}
    lost: list[tuple[int, Prompt, Prompt]] = []
    for prompt in prompts:
        model, rest = prompt.model, prompt.rest
        _, *hashes = accumulate(rest, lambda before, piece: hash((before, piece)), initial=hash((model, prompt.salt)))
        # It continues the last one that ended with one of its messages, or that of its session, unless it only appends.
        earlier = None if prompt.session is None else by_session.get((model, prompt.session))
        for at in reversed(range(len(rest))):
            found = by_end.get((model, rest[at])) if at < len(rest) - 1 else None
            if hashes[at] in whole or found is not None:
                earlier = None if hashes[at] in whole else found
                break
        if earlier is not None and (letters := _kept_letters(earlier, prompt)):
            lost.append((letters, earlier, prompt))
        if rest:
            whole.add(hashes[-1])
            by_end[model, rest[-1]] = by_session[model, prompt.session] = prompt
    if not lost:
        return None
    _, earlier, later = max(lost, key=lambda each: each[0])
    example = example_of(_joined(earlier.rest), _joined(later.rest))
    ids = (earlier.request_id, later.request_id)
    return Loss(HISTORY, len(lost), sum(letters for letters, _, _ in lost), example, ids)


def _kept_letters(earlier: Prompt, later: Prompt) -> int:
    """0 where the two need not be one conversation."""
    shared = 0
    for mine, yours in zip(earlier.rest, later.rest, strict=False):
        if mine != yours:
            break
        shared += 1
    after = set(later.rest[shared:])
    kept = [piece for piece in earlier.rest[shared + 1 :] if piece in after]
    letters = sum(len(piece.text) for piece in kept)
    same_session = earlier.session is not None and earlier.session == later.session
    is_one = shared > 0 or same_session or len(kept) >= LEAST_MESSAGES
    return letters if is_one and letters >= LEAST_LETTERS else 0


def _joined(pieces: Sequence[Piece]) -> str:
    return "\n".join(f"{piece.role}: {piece.text}" for piece in pieces)


VARIABLE_FIRST = Fault(
    "variable text before constant text",
    "Put instructions and examples that are always the same first, and what differs from request to request last.",
)
USER_DATA = ADDRESS

SAMPLE = 64
FEWEST_TEXTS = 4
NEARLY_ALL = 0.8
LEAST_LATE_LETTERS = 160  # constant and late, in a prompt
LEAST_SHARE = 0.15  # the least share of the prompt's beginning
SHORTEST_SENTENCE = 16
LONGEST_DATUM = 200  # letters; more is a text rather than a name
BEGINNING, END = 16, 32  # letters that a kind has in common

_ends = re.compile(r"(?<=[.!?;:])\s+|\n+")

Users: TypeAlias = dict[str, list[Prompt]]  # the prompts of each text


class Place(NamedTuple):
    """A message and everything before it."""

    model: str
    before: tuple[Piece, ...]
    role: str


class Kind(NamedTuple):
    """Some of the texts at one place, with the letters that each shares with any other there."""

    place: Place
    texts: list[str]
    shared: dict[str, int]


class Late(NamedTuple):
    """Constant letters after the first difference, and how far after it they begin."""

    letters: int
    gap: int


def late_constants(prompts: Sequence[Prompt]) -> Iterator[Loss]:
    for place, users in _places(prompts).items():
        if len(users) < FEWEST_TEXTS:
            continue
        done: set[str] = set()
        for kind in _kinds(place, users):
            loss = None if done.issuperset(kind.texts) else _loss(kind, users)
            if loss is not None:
                done.update(kind.texts)
                yield loss
            if len(done) == len(users):
                break


def _places(prompts: Sequence[Prompt]) -> dict[Place, Users]:
    places: defaultdict[Place, Users] = defaultdict(dict)
    for prompt in prompts:
        early = prompt.pieces[: len(prompt.pieces) - max(0, len(prompt.rest) - 1)]
        for at, piece in enumerate(early):
            if piece.role != "tools":
                place = Place(prompt.model, early[:at], piece.role)
                places[place].setdefault(piece.text, []).append(prompt)
    return places


def _kinds(place: Place, users: Users) -> Iterator[Kind]:
    texts = sorted(users)
    shared = dict.fromkeys(texts, 0)
    for one, other in pairwise(texts):
        letters = common(one, other)
        shared[one], shared[other] = max(shared[one], letters), letters
    yield Kind(place, texts, shared)
    for part in (slice(BEGINNING), slice(-END, None)):
        alike: defaultdict[str, list[str]] = defaultdict(list)
        for text in texts:
            alike[text[part]].append(text)
        yield from (Kind(place, some, shared) for some in alike.values() if FEWEST_TEXTS <= len(some) < len(texts))


def _loss(kind: Kind, users: Users) -> Loss | None:
    sample = kind.texts[:: -(-len(kind.texts) // SAMPLE)]
    constant, end = _constant(sample), common_end(sample)
    before = sum(len(piece.text) for piece in kind.place.before)
    sampled = [_late(text, kind.shared[text], constant, end) for text in sample]
    wanted = max(LEAST_LATE_LETTERS, LEAST_SHARE * (before + median(map(len, sample))))
    if median(late.letters for late in sampled) < wanted:
        return None
    each = [_late(text, kind.shared[text], constant, end).letters for text in kind.texts]
    is_datum = Piece(kind.place.role, "").is_leading and median(late.gap for late in sampled) <= LONGEST_DATUM
    one, other = kind.texts[0], kind.texts[-1]
    return Loss(
        USER_DATA if is_datum else VARIABLE_FIRST,
        sum(len(users[text]) for text in kind.texts),
        sum(each) - max(each),
        example_of(one, other),
        (users[one][0].request_id, users[other][0].request_id),
    )


def _constant(sample: Sequence[str]) -> set[str]:
    """Sentences that nearly all of these texts have."""
    counts: defaultdict[str, int] = defaultdict(int)
    for text in sample:
        for sentence in {sentence for sentence, _ in _sentences(text)}:
            counts[sentence] += 1
    return {sentence for sentence, count in counts.items() if count >= NEARLY_ALL * len(sample)}


def _late(text: str, shared: int, constant: set[str], end: int) -> Late:
    late = [(sentence, at) for sentence, at in _sentences(text) if at >= shared and sentence in constant]
    letters = sum(len(sentence) for sentence, _ in late)
    ending = min(end, len(text) - shared)
    if letters >= ending:
        return Late(letters, late[0][1] - shared if late else 0)
    return Late(ending, len(text) - ending - shared)


def _sentences(text: str) -> Iterator[tuple[str, int]]:
    at = 0
    for end in [*_ends.finditer(text), None]:
        stop = len(text) if end is None else end.start()
        if stop - at >= SHORTEST_SENTENCE:
            yield text[at:stop], at
        at = stop if end is None else end.end()
