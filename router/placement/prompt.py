"""The part of a prompt that placement needs."""

from typing import Protocol

from msgspec import Struct


class Prompt(Protocol):
    """The properties of a prompt that placement needs."""

    @property
    def tokens(self) -> int: ...
    @property
    def exact(self) -> bool:
        """False: `tokens` is an estimate, and only approximate blocks are known."""

    @property
    def approximate_block_tokens(self) -> float: ...
    def keys(self, block_size: int, lookahead: int = 0, /) -> list[int]:
        """`lookahead`: tokens after a block that its key covers, too."""


class Unread(Struct, frozen=True):
    """The prompt of a request whose body is not understood."""

    tokens: int = 1
    exact: bool = False
    approximate_block_tokens: float = 1.0

    def keys(self, block_size: int, lookahead: int = 0, /) -> list[int]:  # noqa: ARG002
        return []
