"""KV memory that all ranks share: [ranks * layers, 2, blocks, bytes of one layer's keys or values of one rank].

Each rank computes in its own part. The engine's process reads and writes whole blocks, the parts of all ranks together,
so lower media and neighbours need to know nothing of ranks.
"""

import mmap
import os
import tempfile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged import LayerCache
from replica.model.config import DTYPE_BYTES, ModelConfig
from replica.parallel.shares import Share


class KvForm(NamedTuple):
    """The shape of the KV; `config` is one rank's share of the model, and equal for all of them as far as it counts."""

    config: ModelConfig
    dtype: str
    num_blocks: int
    block_size: int
    ranks: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        block_bytes = self.block_size * self.config.num_kv_heads * self.config.head_dim * DTYPE_BYTES[self.dtype]
        return self.ranks * self.config.num_layers, 2, self.num_blocks, block_bytes

    @property
    def size(self) -> int:
        layers, both, blocks, block_bytes = self.shape
        return layers * both * blocks * block_bytes


def create(size: int) -> int:
    """Return the descriptor of so much memory, zero at first; the system gives it when it is written."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("warmroute-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def attach(descriptor: int, form: KvForm) -> NDArray[np.uint8]:
    """Map the memory; the descriptor may be closed afterwards."""
    return np.frombuffer(mmap.mmap(descriptor, form.size), np.uint8).reshape(form.shape)


def own_caches(memory: NDArray[np.uint8], form: KvForm, share: Share) -> list[LayerCache]:
    """Return one rank's part by layer."""
    config = form.config
    first = share.rank * config.num_layers
    tensor = torch.from_numpy(memory[first : first + config.num_layers]).view(getattr(torch, form.dtype))
    shape = (form.num_blocks, form.block_size, config.num_kv_heads, config.head_dim)
    return [LayerCache(keys.view(shape), values.view(shape)) for keys, values in tensor]
