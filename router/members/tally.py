"""Counts and histograms of one (model, replica), as /metrics shows them: plain numbers, cheap to add to."""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from api.http.prometheus import FIRST_TOKEN_S, Histogram

# vLLM's own bounds, so that dashboards show both side by side.
REQUEST_S = (
    0.005, 0.02, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
DECISION_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)

SEEN_NUMBERS = 2**13  # 64 kB for each table that is used; more is remembered of a replica than most caches hold
# Lengths of beginnings to look at, in blocks: at worst, two thirds of a shared beginning are found.
BEGINNINGS = tuple(sorted({step * 2**power for power in range(14) for step in (2, 3)} | {1}))


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

    def add_beginnings(self, keys: Sequence[int]) -> int:
        """Add a prompt's beginnings by their last keys; return how many blocks the longest had that has come before."""
        blocks, again = len(keys), 0
        if not blocks:
            return 0
        if self._table is None:
            self._table = array("Q", bytes(8 * SEEN_NUMBERS))
        table = self._table  # no call for each: every request has several
        for beginning in BEGINNINGS:
            if beginning >= blocks:
                break
            number = keys[beginning - 1]
            place = number & (SEEN_NUMBERS - 1)
            if table[place] == number:
                again = beginning
            else:
                table[place] = number
        number = keys[-1]
        place = number & (SEEN_NUMBERS - 1)
        if table[place] == number:
            return blocks
        table[place] = number
        return again


@dataclass(slots=True, eq=False)
class Output:
    """Sums over the tokens that a replica has generated for this router, those of answers that still run included."""

    tokens: int = 0
    streamed_tokens: int = 0  # those after the first one of each streamed answer
    streaming_s: float = 0.0  # the time that these have taken


class Memory:
    """Recent keys and salts sent to one replica, for all of its models, as both differ between models."""

    __slots__ = ("beginnings", "salts")

    def __init__(self) -> None:
        self.beginnings = Seen()
        self.salts = Seen()


@dataclass(slots=True, eq=False)
class Tally:
    """Counts and times of one replica for one model, as seen by this router."""

    _memory: Memory
    statuses: dict[int, int] = field(default_factory=dict)
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    request_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    broken: int = 0  # answers that began well and did not come to their end
    prompt_tokens: int = 0
    matched_tokens: int = 0  # predicted
    blocks_predicted: int = 0  # those of requests whose report is known
    blocks_reported: int = 0
    compared_tokens: int = 0  # all of those requests' prompts
    resent_tokens: int = 0  # shared with the beginning of an earlier prompt sent there
    salted: int = 0  # prompts with a cache salt
    new_salts: int = 0  # those among them with one that was not seen before
    source_tokens: dict[str, float] = field(default_factory=dict)  # predicted, by where they were to come from
    billed: int = 0  # prompts that begin with Claude Code's billing line
    cached_tokens: int = 0  # reported: prefill that was saved
    saved_s: float = 0.0  # seconds of prefill, at the replica's speed then

    def sent(self, keys: Sequence[int], block_tokens: float, salt: Hashable | None) -> None:
        """Count a prompt by the keys of its blocks: `resent_tokens` is the hit in a cache that forgets nothing."""
        self.resent_tokens += int(self._memory.beginnings.add_beginnings(keys) * block_tokens)
        if salt is not None:
            self.salted += 1
            self.new_salts += not self._memory.salts.add(hash(salt) & 2**64 - 1)
