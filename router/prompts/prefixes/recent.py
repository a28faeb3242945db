"""The most recently routed prompts: their block keys, and the beginnings of their texts where those may be shown."""

from collections import deque

from msgspec import Struct

MAX_BLOCKS = 200_000  # keys of all together; 8 MB at the most
TEXT_BYTES = 4096  # the text that is kept of each
MAX_TEXT_BYTES = 16 * 2**20  # bytes of all texts together


class RecentPrompt(Struct, frozen=True, gc=False):
    model: str
    block_size: int  # a size in tokens; 0: blocks of text
    keys: list[int]
    at_s: float
    text: bytes | None
    lookahead: int = 0  # tokens after a block that its key covers, too


class RecentPrompts:
    def __init__(self, most_prompts: int) -> None:
        self.most_prompts = most_prompts
        self._routed: deque[RecentPrompt] = deque()
        self._blocks = 0
        self._text_bytes = 0

    def __len__(self) -> int:
        return len(self._routed)

    def add(self, routed: RecentPrompt) -> None:
        """Remember a prompt, unless it has no full block or would take all the space."""
        if not 0 < len(routed.keys) <= MAX_BLOCKS:
            return
        self._routed.append(routed)
        self._blocks += len(routed.keys)
        self._text_bytes += len(routed.text or b"")
        while len(self._routed) > self.most_prompts or self._blocks > MAX_BLOCKS or self._text_bytes > MAX_TEXT_BYTES:
            oldest = self._routed.popleft()
            self._blocks -= len(oldest.keys)
            self._text_bytes -= len(oldest.text or b"")

    def all(self) -> list[RecentPrompt]:
        return list(self._routed)

    def check(self) -> None:
        assert len(self._routed) <= self.most_prompts
        assert self._blocks == sum(len(one.keys) for one in self._routed) <= MAX_BLOCKS
        assert self._text_bytes == sum(len(one.text or b"") for one in self._routed) <= MAX_TEXT_BYTES
