"""The interface of attention over paged KV memory; `kernels.reference` specifies the result of every backend.

A step's rows are tokens: first one of each sequence that decodes, then the prefills, sequence by sequence. A step goes

    copy      the beginnings of blocks that other blocks share          all layers at once      `kernels.pointwise`
    store     the rows' keys and values into their blocks               for each layer          `kernels.pointwise`
    decode    the rows that decode, each against its own sequence       for each layer
    prefill   the other rows, each against its sequence up to itself    for each layer

A backend of a CPU is told of each sequence by itself (`kernels.contexts`), one of a GPU of all (`kernels.tables`).

A slot is a place in memory for one token: block * block_size + the place in the block.
"""

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from kernels.contexts import ContextStep
from kernels.tables import TableStep


class LayerCache(NamedTuple):
    """One layer's KV memory; both tensors are [blocks, block_size, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


class KvShape(NamedTuple):
    """The KV that attention is to read."""

    dtype: torch.dtype
    block_size: int  # tokens
    head_dim: int
    group: int = 1  # query heads that share a KV head


# The inputs that all layers of one step share; made once per step.
Step: TypeAlias = ContextStep | TableStep
AnyStep = TypeVar("AnyStep", bound=Step)
OwnStep = TypeVar("OwnStep", bound=Step, contravariant=True)


class Attention(ABC, Generic[OwnStep]):
    """One implementation of attention; queries and results are [rows, heads, head_dim], grouped by KV head."""

    name: str

    def plan(self, step: OwnStep, cache: LayerCache) -> Tensor | None:  # noqa: ARG002
        """Find out once what all layers of a step need to know, for its `plan`."""
        return None

    @abstractmethod
    def decode(self, queries: Tensor, cache: LayerCache, step: OwnStep) -> Tensor:
        """Attend each decoding row to the KV of its sequence."""

    @abstractmethod
    def prefill(self, queries: Tensor, cache: LayerCache, step: OwnStep) -> Tensor:
        """Attend the prefill rows, in order, each to the KV up to its own token."""

    def attend(self, queries: Tensor, cache: LayerCache, step: OwnStep) -> Tensor:
        """Attend all rows of a step."""
        if not step.prefilling:
            return self.decode(queries, cache, step)
        if not step.decoding:
            return self.prefill(queries, cache, step)
        decoded = self.decode(queries[: step.decoding], cache, step)
        return torch.cat((decoded, self.prefill(queries[step.decoding :], cache, step)))
