"""A step for a CPU: each sequence by itself, with the slots of all its tokens."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from kernels.spans import Span

LONG = 256  # tokens in consecutive slots that are read where they lie; fewer are sooner copied together

Place: TypeAlias = slice | Tensor  # consecutive slots, or any


@dataclass(frozen=True)
class Context:
    """One sequence up to this step's last token: all its slots, and the range of its rows."""

    slots: Tensor
    start: int
    tokens: int

    @property
    def length(self) -> int:
        return self.start + self.tokens

    @cached_property
    def _bounds(self) -> list[int]:
        """Return the beginnings of runs of tokens in consecutive slots, and the length."""
        breaks = np.flatnonzero(np.diff(self.slots.numpy()) != 1) + 1
        return [0, *breaks.tolist(), self.length]

    def place(self, begin: int, end: int) -> Place:
        """The slots of these tokens, at least one."""
        if self._bounds[bisect_right(self._bounds, begin)] < end:
            return self.slots[begin:end]
        first = int(self.slots[begin])
        return slice(first, first + end - begin)

    @cached_property
    def own(self) -> Place:
        """The slots of the rows."""
        return self.place(self.start, self.length)

    @cached_property
    def seen(self) -> list[Place]:
        """The slots of what all rows see, in any order: of every token for a single row, else of those before."""
        end = self.length if self.tokens == 1 else self.start
        edges = [bound for bound in self._bounds if bound < end] + [end]
        runs = [self.place(*run) for run in pairwise(edges) if run[1] - run[0] >= LONG]
        short = [self.slots[begin:stop] for begin, stop in pairwise(edges) if stop - begin < LONG]
        return [*runs, *([torch.cat(short)] if short else [])]


class ContextStep:
    def __init__(self, decodes: Sequence[Span], prefills: Sequence[Span], block_size: int) -> None:
        spans = [*decodes, *prefills]
        contexts = [_context(span, block_size) for span in spans]
        self.decodes = contexts[: len(decodes)]
        self.prefills = contexts[len(decodes) :]
        self.decoding = len(decodes)
        self.prefilling = sum(span.tokens for span in prefills)
        self.positions = torch.cat([torch.arange(span.start, span.start + span.tokens) for span in spans])
        self.slots = torch.cat([context.slots[context.start :] for context in contexts])


def _context(span: Span, block_size: int) -> Context:
    length = span.start + span.tokens
    blocks = torch.tensor(span.blocks[: -(-length // block_size)], dtype=torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
    return Context(slots, span.start, span.tokens)
