"""A step's work for attention, without torch: spans of sequences, and block copies that come first."""

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Tokens `start` to `start + tokens` of one sequence in this step; its KV lies in `blocks`."""

    blocks: Sequence[int]
    start: int
    tokens: int


class Copy(NamedTuple):
    """Copy the KV of the first `tokens` of one block to another block."""

    source: int
    target: int
    tokens: int
