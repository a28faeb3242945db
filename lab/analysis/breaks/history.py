"""Conversations whose earlier messages were changed or dropped: all after the first change is computed again."""

from collections.abc import Sequence

from lab.analysis.breaks.finding import Fault, Loss
from lab.analysis.breaks.prompts import Piece, Prompt
from lab.analysis.breaks.texts import example_of

HISTORY = Fault(
    "history changed or cut",
    "Only append to a conversation; where it must be cut, cut much at once and seldom, and after the system prompt.",
)
LEAST_LETTERS = 20  # kept of what went before; less may be chance
LEAST_MESSAGES = 2  # kept, where nothing else says that it is one conversation


def changed_history(prompts: Sequence[Prompt]) -> Loss | None:
    """Find conversations that change or cut earlier messages, and the tokens that they recompute."""
    talks = Talks()
    lost: list[tuple[int, Prompt, Prompt]] = []
    for prompt in prompts:
        earlier = talks.before(prompt)
        if earlier is not None and (letters := _kept_letters(earlier, prompt)):
            lost.append((letters, earlier, prompt))
        talks.add(prompt)
    if not lost:
        return None
    _, earlier, later = max(lost, key=lambda each: each[0])
    example = example_of(_joined(earlier.rest), _joined(later.rest))
    ids = (earlier.request_id, later.request_id)
    return Loss(HISTORY, len(lost), sum(letters for letters, _, _ in lost), example, ids)


class Talks:
    """Finds the request that a prompt continues: the last one that ended with one of its messages."""

    def __init__(self) -> None:
        self._whole: set[int] = set()  # hashes of everything after the system prompt
        self._by_end: dict[tuple[str, Piece], Prompt] = {}
        self._by_session: dict[tuple[str, str], Prompt] = {}

    def add(self, prompt: Prompt) -> None:
        if not prompt.rest:
            return
        self._whole.add(_hashes(prompt)[-1])
        self._by_end[prompt.model, prompt.rest[-1]] = prompt
        if prompt.session is not None:
            self._by_session[prompt.model, prompt.session] = prompt

    def before(self, prompt: Prompt) -> Prompt | None:
        """Return the prompt that this one continues with changes; None if it only appends."""
        hashes = _hashes(prompt)
        for at in reversed(range(len(prompt.rest))):
            if hashes[at] in self._whole:
                return None
            found = self._by_end.get((prompt.model, prompt.rest[at])) if at < len(prompt.rest) - 1 else None
            if found is not None:
                return found
        return None if prompt.session is None else self._by_session.get((prompt.model, prompt.session))


def _hashes(prompt: Prompt) -> list[int]:
    """Hash the conversation up to each message."""
    found, before = [], hash((prompt.model, prompt.salt))
    for piece in prompt.rest:
        before = hash((before, piece))
        found.append(before)
    return found


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
