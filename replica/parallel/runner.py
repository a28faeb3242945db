"""The runner of an engine whose model several processes compute: this one is rank 0, and leads the others."""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.contexts import ContextStep
from kernels.paged import Attention, LayerCache
from kernels.spans import Copy, Span
from replica.block_memory import ArrayMemory
from replica.config import EngineConfig
from replica.model.config import ModelConfig
from replica.model.transformer import Transformer
from replica.native import NativeRunner, load, refuse_too_large
from replica.parallel import memory
from replica.parallel.followers import Followers
from replica.parallel.group import GroupRanks
from replica.parallel.memory import KvForm
from replica.parallel.messages import Compute, Logits
from replica.parallel.shares import Share, refuse_what_does_not_divide
from replica.request import Scheduled
from replica.runner import SampledToken


def lead(config: EngineConfig, model_config: ModelConfig, attention: Attention[ContextStep]) -> "ParallelRunner":
    """Start the other ranks, and load what each of them computes. ValueError, OSError, MemoryError: that cannot be."""
    share = Share(0, config.tensor_parallel_size)
    refuse_what_does_not_divide(model_config, share.size)
    form = KvForm(share.own(model_config), config.dtype, config.num_blocks, config.block_size, share.size)
    refuse_too_large(config.num_blocks, config.block_size, form.size)
    kv_fd = memory.create(form.size)
    try:
        array = memory.attach(kv_fd, form)
        followers = Followers(config, kv_fd)
    finally:
        os.close(kv_fd)
    try:
        model = load(config, model_config, share, LeadingRanks(share, model_config, followers))
        followers.wait_ready()
        followers.watch()
    except BaseException:
        followers.close()
        raise
    kv = memory.own_caches(array, form, share), ArrayMemory(array)
    return ParallelRunner(model, attention, config.num_blocks, config.block_size, kv, followers)


class LeadingRanks(GroupRanks):
    """Has the followers take part in logits."""

    def __init__(self, share: Share, config: ModelConfig, followers: Followers) -> None:
        super().__init__(share, config, followers.group)
        self.followers = followers

    def spread(self, hidden: Tensor) -> Tensor:
        self.followers.tell(Logits(len(hidden)))
        return super().spread(hidden)


class ParallelRunner(NativeRunner):
    """A step is over for all ranks when its last sum is: each rank stores its KV before it sends its part of that."""

    def __init__(
        self,
        model: Transformer,
        attention: Attention[ContextStep],
        num_blocks: int,
        block_size: int,
        kv: tuple[list[LayerCache], ArrayMemory],
        followers: Followers,
    ) -> None:
        super().__init__(model, attention, num_blocks, block_size, kv)
        self.followers = followers

    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        try:
            return super().run(batch)
        except ConnectionError as error:
            self.followers.give_up(error)

    def compute(
        self,
        token_ids: NDArray[np.int64],
        spans: Sequence[Span],
        copies: Sequence[Copy],
        adapters: Sequence[str | None],
    ) -> Tensor:
        self.followers.tell(Compute(token_ids.tobytes(), spans, copies, adapters))
        return super().compute(token_ids, spans, copies, adapters)

    def close(self) -> None:
        self.followers.close()
