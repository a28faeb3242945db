"""The runner of an engine whose model several processes compute: this one is rank 0, and leads the others."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.contexts import ContextStep
from kernels.paged import Attention
from kernels.spans import Copy, Span
from replica.config import EngineConfig
from replica.cpu.runner import NativeRunner, load
from replica.model.config import ModelConfig
from replica.parallel import followers, memory
from replica.parallel.adapters import OthersAdapters, refuse_other_files
from replica.parallel.followers import Followers
from replica.parallel.group import Group, connected, memory_size
from replica.parallel.memory import KvForm
from replica.parallel.messages import Compute, Logits, Start, decode_answer
from replica.parallel.ranks import LeadingRanks
from replica.parallel.shares import Share, refuse_what_does_not_divide
from replica.runners.request import Scheduled
from replica.runners.runner import SampledToken
from replica.transformer import Transformer

PROGRAM = "replica.cpu.follower"


def lead(config: EngineConfig, model_config: ModelConfig, attention: Attention[ContextStep]) -> "ParallelRunner":
    """Start the other ranks, and load what each of them computes. ValueError, OSError, MemoryError: that cannot be."""
    share = Share(0, config.tensor_parallel_size)
    refuse_what_does_not_divide(model_config, share.size)
    form = memory.kv_form(config, model_config, share)
    with shared(prod(form.shape)) as kv, shared(memory_size(share.size)) as exchange, ExitStack() as undo:
        array = memory.attach(kv, form)
        own, *theirs = connected(share.size)
        group = Group(share, exchange, own)
        undo.callback(group.close)
        with ExitStack() as given:
            for peer in chain.from_iterable(theirs):
                given.enter_context(peer)
            starts = []
            for rank, peers in enumerate(theirs, start=1):
                sockets = [peer.fileno() for peer in peers]
                message = Start(config, rank, kv, exchange, sockets)
                starts.append(followers.Start(message, [kv, exchange, *sockets]))
            others = Followers(PROGRAM, starts)
        undo.callback(others.close)
        ranks = LeadingRanks(share, model_config, group, lambda rows: others.tell(Logits(rows)))
        model = load(config, model_config, share, ranks)
        refuse_other_files(model.adapters, others.answers(decode_answer))
        others.watch()
        model.adapters.others = OthersAdapters(others)
        undo.pop_all()
    return ParallelRunner(model, attention, form, array, others, group)


@contextmanager
def shared(size: int) -> Iterator[int]:
    """Memory that followers may inherit, by its descriptor."""
    descriptor = memory.create(size)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class ParallelRunner(NativeRunner):
    """A step is over for all ranks when its last sum is: each rank stores its KV before it sends its part of that."""

    def __init__(
        self,
        model: Transformer,
        attention: Attention[ContextStep],
        form: KvForm,
        kv: NDArray[np.uint8],
        others: Followers,
        group: Group,
    ) -> None:
        super().__init__(model, attention, form, kv)
        self.others = others
        self._group = group

    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        try:
            return super().run(batch)
        except ConnectionError as error:
            self.others.give_up(error)

    def compute(
        self,
        token_ids: NDArray[np.int64],
        spans: Sequence[Span],
        copies: Sequence[Copy],
        adapters: Sequence[str | None],
    ) -> Tensor:
        self.others.tell(Compute(token_ids.tobytes(), spans, copies, adapters))
        return super().compute(token_ids, spans, copies, adapters)

    def close(self) -> None:
        self.others.close()
        self._group.close()
