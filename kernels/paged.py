"""The interface of attention over paged KV memory; `tests.kernels.reference` specifies the result of every backend.

A step's rows are tokens, sequence by sequence; for a GPU, those come first that decode, with one row each. A step goes

    copy      the beginnings of blocks that other blocks share          all layers at once      `kernels.pointwise`
    store     the rows' keys and values into their blocks               for each layer          `kernels.pointwise`
    attend    the rows, each against its own sequence up to itself      for each layer

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
    def attend(self, queries: Tensor, cache: LayerCache, step: OwnStep) -> Tensor:
        """Attend each row of a step to the KV of its sequence up to its own token."""
