"""Losses after the beginnings: a changed history, and text that is the same in all prompts and comes late.

All after the first change of a conversation is computed again.

Constant text that comes after text that differs cannot be shared. Prompts that agree up to a message are compared in
that message, and only in the first ones of a conversation. What nearly all of a sample of them say is constant.
Documents that some prompts have in common are not: nobody can put them first.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple, TypeAlias

from lab.analysis.breaks.prompts import Fault, Loss, Piece, Prompt, common, example_of
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

_ends = re.compile(r"(?<=[.!?;:])\s+|\n+")

Users: TypeAlias = dict[str, list[Prompt]]  # the prompts of each text


class Place(NamedTuple):
    model: str
    before: tuple[Piece, ...]
    role: str


def late_constants(prompts: Sequence[Prompt]) -> Iterator[Loss]:
    places: defaultdict[Place, Users] = defaultdict(dict)
    for prompt in prompts:
        early = prompt.pieces[: len(prompt.pieces) - max(0, len(prompt.rest) - 1)]
        for at, piece in enumerate(early):
            if piece.role != "tools":
                place = Place(prompt.model, early[:at], piece.role)
                places[place].setdefault(piece.text, []).append(prompt)
    for place, users in places.items():
        if len(users) >= FEWEST_TEXTS and (loss := _loss(place, users)) is not None:
            yield loss


def _loss(place: Place, users: Users) -> Loss | None:
    texts = sorted(users)
    shared = dict.fromkeys(texts, 0)  # the letters that each has in common with any other
    for one, other in pairwise(texts):
        letters = common(one, other)
        shared[one], shared[other] = max(shared[one], letters), letters
    sample = texts[:: -(-len(texts) // SAMPLE)]
    uses = Counter(sentence for text in sample for sentence in {sentence for sentence, _ in _sentences(text)})
    late: dict[str, int] = {}  # the constant letters of each after the first difference
    gaps: list[int] = []  # how far after it they begin
    for text in texts:
        found = [
            (sentence, at)
            for sentence, at in _sentences(text)
            if at >= shared[text] and uses[sentence] >= NEARLY_ALL * len(sample)
        ]
        late[text] = sum(len(sentence) for sentence, _ in found)
        gaps += [at - shared[text] for _, at in found[:1]]
    before = sum(len(piece.text) for piece in place.before)
    wanted = max(LEAST_LATE_LETTERS, LEAST_SHARE * (before + median(map(len, sample))))
    if median(late[text] for text in sample) < wanted:
        return None
    is_datum = Piece(place.role, "").is_leading and median(gaps) <= LONGEST_DATUM
    one, other = texts[0], texts[-1]
    return Loss(
        USER_DATA if is_datum else VARIABLE_FIRST,
        sum(map(len, users.values())),
        sum(late.values()) - max(late.values()),
        example_of(one, other),
        (users[one][0].request_id, users[other][0].request_id),
    )


def _sentences(text: str) -> Iterator[tuple[str, int]]:
    at = 0
    for end in [*_ends.finditer(text), None]:
        stop = len(text) if end is None else end.start()
        if stop - at >= SHORTEST_SENTENCE:
            yield text[at:stop], at
        at = stop if end is None else end.end()
