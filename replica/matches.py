"""The parts of a prompt that the block pool finds, and how often it was asked."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from replica.names import NOBODY


class Lookups(Struct):
    """Tokens and blocks that admitted requests looked up and found; preempted requests are counted apart."""

    query_tokens: int = 0
    hit_tokens: int = 0
    query_blocks: int = 0
    hit_blocks: int = 0
    partial_hit_tokens: int = 0
    preempted_query_tokens: int = 0
    preempted_hit_tokens: int = 0


class Match(NamedTuple):
    """The longest cached prefix of a chain: the blocks that hold it, and the identity of the last (0: none)."""

    blocks: list[int]
    identity: int
    refused: bool = False  # the next block's key is here, with other content
    lower: Sequence[int] = ()  # the slots of lower media that hold the blocks after these


class PartialBlock(NamedTuple):
    """The first `tokens` of a chain's next block, as the block `source` holds them."""

    source: int
    tokens: int
    adoptable: bool  # they are all that it holds, and nobody uses it: it may be taken as a hit and written on


NO_MATCH = Match([], 0)
NO_PART = PartialBlock(NOBODY, 0, adoptable=False)
