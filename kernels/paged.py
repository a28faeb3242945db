"""What an engine asks of attention over paged KV memory; `kernels.reference` says what every backend must compute.

A step's rows are tokens: first one of each sequence that decodes, then the prefills, sequence by sequence. A step goes

    copy      the beginnings of blocks that other blocks share          all layers at once
    store     the rows' keys and values into their blocks               for each layer
    decode    the rows that decode, each against its own sequence       for each layer
    prefill   the other rows, each against its sequence up to itself    for each layer
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.spans import Copy, Span


class LayerCache(NamedTuple):
    """One layer's KV memory; both tensors are [blocks, block_size, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


class Context(NamedTuple):
    """One sequence up to this step's last token: where the KV of each is, and which of them are rows.

    A slot is a place in memory for one token: block * block_size + the place in the block.
    """

    slots: Tensor
    start: int
    tokens: int

    @property
    def length(self) -> int:
        return self.start + self.tokens


class Step:
    """What the layers of one step have in common; made once for all of them."""

    def __init__(self, decodes: Sequence[Span], prefills: Sequence[Span], block_size: int) -> None:
        spans = [*decodes, *prefills]
        contexts = [_context(span, block_size) for span in spans]
        self.decodes = contexts[: len(decodes)]
        self.prefills = contexts[len(decodes) :]
        self.positions = torch.cat([torch.arange(span.start, span.start + span.tokens) for span in spans])
        self.slots = torch.cat([context.slots[context.start :] for context in contexts])  # of the rows


def _context(span: Span, block_size: int) -> Context:
    length = span.start + span.tokens
    blocks = torch.tensor(span.blocks[: -(-length // block_size)], dtype=torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
    return Context(slots, span.start, span.tokens)


class Attention(ABC):
    """One way to compute attention; queries and results are [rows, heads, head_dim], heads of a group side by side."""

    name: str

    @abstractmethod
    def decode(self, queries: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Row i against the KV of `step.decodes[i]`."""

    @abstractmethod
    def prefill(self, queries: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """The rows of `step.prefills`, one after the other, each against the KV up to its own token."""

    def store(self, keys: Tensor, values: Tensor, cache: LayerCache, step: Step) -> None:
        """Keep the rows' KV, [rows, kv_heads, head_dim]."""
        for rows, memory in ((keys, cache.keys), (values, cache.values)):
            memory.flatten(0, 1).index_copy_(0, step.slots, rows)

    def copy(self, caches: Sequence[LayerCache], copies: Sequence[Copy]) -> None:
        """All sources are read as they were before the first target is written."""
        for cache in caches:
            for memory in cache:
                beginnings = [memory[copy.source, : copy.tokens].clone() for copy in copies]
                for copy, beginning in zip(copies, beginnings, strict=True):
                    memory[copy.target, : copy.tokens] = beginning

    def attend(self, queries: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """All rows of a step."""
        decoding = len(step.decodes)
        if not step.prefills:
            return self.decode(queries, cache, step)
        if not decoding:
            return self.prefill(queries, cache, step)
        decoded = self.decode(queries[:decoding], cache, step)
        return torch.cat((decoded, self.prefill(queries[decoding:], cache, step)))
