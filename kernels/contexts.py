"""A step for a CPU: each sequence by itself, with the slots of all its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
    def own(self) -> Place:
        """The slots of the rows."""
        first, last = int(self.slots[self.start]), int(self.slots[-1])
        consecutive = bool((self.slots[self.start :].diff() == 1).all())
        return slice(first, last + 1) if consecutive else self.slots[self.start :]

    @cached_property
    def seen(self) -> list[Place]:
        """The slots of what all rows see: of every token for a single row, else of those before.

        They are sorted: their order does not matter, and blocks that were in use before come back in any order.
        """
        slots = np.sort(self.slots[: self.length if self.tokens == 1 else self.start].numpy())
        parts = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1) if len(slots) else []
        runs: list[Place] = [slice(int(part[0]), int(part[-1]) + 1) for part in parts if len(part) >= LONG]
        short = [part for part in parts if len(part) < LONG]
        return [*runs, torch.from_numpy(np.concatenate(short))] if short else runs


class ContextStep:
    def __init__(self, spans: Sequence[Span], block_size: int) -> None:
        self.contexts: list[Context] = []
        for span in spans:
            length = span.start + span.tokens
            blocks = torch.tensor(span.blocks[: -(-length // block_size)], dtype=torch.int64)
            slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
            self.contexts.append(Context(slots, span.start, span.tokens))
        self.positions = torch.cat([torch.arange(context.start, context.length) for context in self.contexts])
        self.slots = torch.cat([context.slots[context.start :] for context in self.contexts])
