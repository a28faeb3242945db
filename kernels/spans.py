"""What a step asks of attention, without torch: parts of sequences, and what to copy before it."""

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """In this step, the tokens `start` to `start + tokens` of one sequence, whose KV lies in `blocks`."""

    blocks: Sequence[int]
    start: int
    tokens: int


class Copy(NamedTuple):
    """The KV of the first `tokens` of one block, to the same places of another."""

    source: int
    target: int
    tokens: int
