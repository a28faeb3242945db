"""A step for a CPU: each sequence by itself, with the slots of all its tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.spans import Span


class Context(NamedTuple):
    """One sequence up to this step's last token: all its slots, and the range of its rows."""

    slots: Tensor
    start: int
    tokens: int

    @property
    def length(self) -> int:
        return self.start + self.tokens


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
