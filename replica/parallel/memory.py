"""KV memory that all ranks share: [ranks * layers, 2, blocks, bytes of one layer's keys or values of one rank].

Each rank computes in its own part. The engine's process reads and writes whole blocks, the parts of all ranks together,
so lower media and neighbours need to know nothing of ranks.
"""

import mmap
import os
import tempfile
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged import LayerCache
from replica.config import EngineConfig
from replica.model.config import DTYPE_BYTES, ModelConfig
from replica.parallel.shares import Share


class KvForm(NamedTuple):
    """The shape of the KV; `config` is one rank's share of the model, and equal for all of them as far as it counts."""

    config: ModelConfig
    dtype: str
    num_blocks: int
    block_size: int
    share: Share

    @property
    def shape(self) -> tuple[int, int, int, int]:
        block_bytes = self.block_size * self.config.num_kv_heads * self.config.head_dim * DTYPE_BYTES[self.dtype]
        return self.share.size * self.config.num_layers, 2, self.num_blocks, block_bytes

    def own_caches(self, memory: NDArray[np.uint8]) -> list[LayerCache]:
        """Return this rank's part of the memory by layer."""
        first = self.share.rank * self.config.num_layers
        tensor = torch.from_numpy(memory[first : first + self.config.num_layers]).view(getattr(torch, self.dtype))
        shape = (self.num_blocks, self.block_size, self.config.num_kv_heads, self.config.head_dim)
        return [LayerCache(keys.view(shape), values.view(shape)) for keys, values in tensor]


def kv_form(config: EngineConfig, model_config: ModelConfig, share: Share) -> KvForm:
    """Raise MemoryError for more than this machine has: it would be given all the same, and be missing later."""
    form = KvForm(share.own(model_config), config.dtype, config.num_blocks, config.block_size, share)
    size, memory = prod(form.shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise MemoryError(
            f"{config.num_blocks} blocks of {config.block_size} tokens are {size / 1e9:,.1f} GB of KV, and this "
            f"machine has {memory / 1e9:,.1f} GB; lower --kv-cache-gb or --num-blocks"
        )
    return form


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
    return np.frombuffer(mmap.mmap(descriptor, prod(form.shape)), np.uint8).reshape(form.shape)
