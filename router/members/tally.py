"""Counts and histograms of one (model, replica), as /metrics shows them: plain numbers, cheap to add to."""

from array import array
from collections.abc import Hashable
from dataclasses import dataclass

from msgspec import field

from api.http.prometheus import FIRST_TOKEN_S, Histogram
from router.responses import CAUSES, PromptCounts

# vLLM's own bounds, so that dashboards show both side by side.
REQUEST_S = (
    0.005, 0.02, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
DECISION_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)

SEEN_NUMBERS = 2**13  # 64 kB for each table that is used


class Seen:
    """Recent keys, in a table of fixed size: a newer key may take an older one's place."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table: array[int] | None = None  # most routers see no salts

    def add(self, number: int) -> bool:
        """Add an unsigned number of 64 bits; return True if it has come before."""
        if self._table is None:
            self._table = array("Q", bytes(8 * SEEN_NUMBERS))
        place = number & (SEEN_NUMBERS - 1)
        was = self._table[place] == number
        self._table[place] = number
        return was


@dataclass(slots=True, eq=False)
class Output:
    """Sums over the tokens that a replica has generated for this router, those of answers that still run included."""

    tokens: int = 0
    streamed_tokens: int = 0  # those after the first one of each streamed answer
    streaming_s: float = 0.0  # the time that these have taken


class Tally(PromptCounts, eq=False):
    """Counts and times of one replica for one model, as seen by this router."""

    _salts: Seen
    statuses: dict[int, int] = field(default_factory=dict)
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    request_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    broken: int = 0  # answers that began well and did not come to their end
    compared_tokens: int = 0  # all prompts of requests whose report is known
    held_tokens: int = 0  # the most that a replica was predicted to have cached
    saved_s: float = 0.0  # seconds of prefill that the cache saved, at the replica's speed then

    def sent(self, salt: Hashable) -> None:
        """Count a prompt with a cache salt."""
        self.salted += 1
        self.new_salts += not self._salts.add(hash(salt) & 2**64 - 1)

    def computed(self, computed_tokens: int, prompt_tokens: int, *ends: int) -> None:
        """Count the computed tokens, which are the last of a prompt, by cause; `ends`: where each cause's part ends."""
        at = max(0, prompt_tokens - computed_tokens)
        self.unknown_tokens += computed_tokens - (prompt_tokens - at)  # more than there are
        for cause, end in zip(CAUSES, (*ends, prompt_tokens), strict=True):
            if end > at:
                setattr(self, cause, getattr(self, cause) + end - at)
                at = end
