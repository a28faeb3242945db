"""Which shapes of requests (`engines.prompts.asked`) are known to give the engine's own tokens, and at which replicas.

A shape is verified by the engine's own tokens for one request of it, at each replica by itself: replicas of one model
may differ in version and options. Until the first is verified, and as long as one differs, prompts of the shape are
matched approximately. A difference counts for the requests that are at least as odd as the one that differed: one
client's odd request takes nothing from the others, and a difference in a plain one counts for all of its shape.

Clients choose shapes, so all of it is bounded: how many are known, how many are asked about, and how often.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from api.prompts.billing import BILLING_HEADER
from engines.prompts import dates
from router.prompts.prompt import Peek

NOT_YET = "its shape is not verified yet"
NOT_THERE = "its shape is not verified at the chosen replica yet"
DIFFERS = "its shape has other tokens there"
MAX_SHAPES = 512  # the most shapes of one model; the least used one makes room
MAX_PROCESSES = 4096  # the most processes at which one shape is verified
MAX_DIFFERENCES = 64  # the most differences of one shape
RETRY_S, MAX_RETRY_S = 60.0, 3600.0  # after a difference, doubled each time
CONTEXT_TOKENS = 24  # around a difference

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

Odd: TypeAlias = Callable[[], Oddities]


class Difference(Struct, frozen=True):
    """The first token that an engine has and we have not, with the text around it at both."""

    replica: str
    position: int
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.replica} has another token at {self.position}"


class Differing(Struct, frozen=True):
    """A kind of requests of a shape that differs at a process."""

    difference: Difference
    times: int
    again_s: float  # the time at which it may be asked again


class Shape(Struct, eq=False):
    name: str
    at: set[str] = msgspec.field(default_factory=set)  # processes of replicas where it is verified
    # Each process has the odd fields of the request that differed.
    differs: dict[tuple[str, Oddities], Differing] = msgspec.field(default_factory=dict)
    uses: int = 0  # uses since it was last a candidate for removal


class Shapes:
    """The shapes of one model. `why_not` may be called from any thread; all else belongs to the event loop.

    `odd` says what is odd about a request. It is only called where a request of the shape has differed.
    """

    def __init__(self) -> None:
        self.known: dict[str, Shape] = {}
        self.silent: str | None = None  # why its replicas cannot be asked; then tokens are used, and not called exact
        # Each process has the last quarter of an hour in which it was asked for the date, and its difference from ours.
        self.dates: dict[str, tuple[int, Difference | None]] = {}
        self._ask_again_s = 0.0

    def why_not(self, name: str, odd: Odd) -> str | None:
        """The reason why prompts of this shape are not exact; None if they are."""
        shape = self.known.get(name)
        if shape is None:
            return NOT_YET
        shape.uses += 1
        if shape.differs:
            oddities = odd()
            if any(differing <= oddities for _, differing in list(shape.differs)):
                return DIFFERS
        return None if shape.at else NOT_YET

    def is_exact(self, name: str) -> bool:
        """Tell whether plain requests of the shape are exact."""
        shape = self.known.get(name)
        return shape is not None and bool(shape.at) and all(oddities for _, oddities in shape.differs)

    def is_verified_at(self, name: str, process: str) -> bool:
        shape = self.known.get(name)
        return shape is not None and process in shape.at

    def may_ask(self, name: str, process: str, odd: Odd, now_s: float) -> bool:
        """Return whether this process is worth a question about the shape now."""
        if self.silent is not None and now_s < self._ask_again_s:
            return False
        shape = self.known.get(name)
        if shape is None:
            return True
        differing = shape.differs.get((process, odd())) if shape.differs else None
        if differing is not None:
            return now_s >= differing.again_s
        return process not in shape.at and (process, PLAIN) not in shape.differs

    # ---- the date, in templates that show it

    def date(self, process: str, quarter: int | None) -> bool | None:
        """Return whether the process shows our date in this quarter of an hour; None: that is not known."""
        asked, difference = self.dates.get(process, (None, None))
        return None if quarter is None or asked != quarter else difference is None

    def has_date(self, process: str, dated_s: float | None, now_s: float) -> bool:
        """Tell whether the process shows now what was shown here when the prompt was made."""
        if dated_s is None:
            return True
        quarter = dates.quarter(now_s)
        return dates.quarter(dated_s) == quarter and self.date(process, quarter) is True

    def other_date(self, dated_s: float) -> bool:
        """Tell whether some process showed another date in the quarter of an hour of that time."""
        quarter = dates.quarter(dated_s)
        return any(asked == quarter and difference is not None for asked, difference in list(self.dates.values()))

    # ---- results

    def verified(self, name: str, process: str, odd: Odd) -> None:
        """Note that the process agrees about a request. It is asked again about what is as odd, and differed."""
        shape = self._shape(name)
        self.silent = None
        if shape.differs:
            shape.differs.pop((process, odd()), None)
        if (process, PLAIN) not in shape.differs and len(shape.at) < MAX_PROCESSES:
            shape.at.add(process)

    def differed(self, name: str, process: str, odd: Odd, difference: Difference, now_s: float) -> None:
        shape, oddities = self._shape(name), odd()
        if oddities == PLAIN:
            shape.at.discard(process)
        before = shape.differs.get((process, oddities))
        times = 0 if before is None else before.times + 1
        again_s = now_s + min(MAX_RETRY_S, RETRY_S * 2 ** min(times, 16))
        if before is None and len(shape.differs) >= MAX_DIFFERENCES:
            del shape.differs[next((one for one in shape.differs if one[1] != PLAIN), next(iter(shape.differs)))]
        shape.differs[process, oddities] = Differing(difference, times, again_s)

    def unanswered(self, why: str, now_s: float) -> None:
        """Note that the engine does not say its tokens at all."""
        self.silent, self._ask_again_s = why, now_s + RETRY_S

    def forget(self, process: str) -> None:
        self.dates.pop(process, None)
        for shape in self.known.values():
            shape.at.discard(process)
            for one in [one for one in shape.differs if one[0] == process]:
                del shape.differs[one]

    def differences(self) -> Iterator[tuple[str, Difference]]:
        """The shapes that differ, each with what is odd about its requests that do."""
        for shape in self.known.values():
            for (_, oddities), differing in shape.differs.items():
                odd = f"; with {', '.join(sorted(oddities))}" if oddities else ""
                yield shape.name + odd, differing.difference
        for _, difference in self.dates.values():
            if difference is not None:
                yield "the date in the chat template", difference

    def _shape(self, name: str) -> Shape:
        shape = self.known.get(name)
        if shape is None:
            if len(self.known) >= MAX_SHAPES:
                del self.known[min(self.known.values(), key=lambda shape: shape.uses).name]
                for shape in self.known.values():
                    shape.uses //= 2
            shape = self.known[name] = Shape(name)
        return shape


def difference(
    replica: str, ours: Sequence[int], theirs: Sequence[int], text_of: Callable[[list[int]], str]
) -> Difference | None:
    """The first difference between our tokens and the engine's, if there is one."""
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    around = slice(max(0, position - CONTEXT_TOKENS), position + CONTEXT_TOKENS)
    return Difference(replica, position, text_of(list(ours[around])), text_of(list(theirs[around])))


def oddities(peek: Peek, special: Sequence[str], *, read_apart: bool) -> Oddities:
    """Return the oddities of a request; `special`: the texts of special tokens."""
    if read_apart:
        return LARGE
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
