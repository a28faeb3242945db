"""A further rank of an engine on GPUs: see `replica.parallel.following`."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from replica.device.accelerator import Accelerator, Span
from replica.device.collectives import NCCL, DeviceGroup
from replica.device.memory import DeviceMemory
from replica.device.orders import Build, Capture, Load, Measure, Measured, Meet, Order, decode_order
from replica.device.parts import Parts, load
from replica.device.ranks_memory import Keeper, opened
from replica.device.steps import Steps
from replica.model.config import read_config
from replica.parallel.adapters import OwnAdapters, loaded_with
from replica.parallel.following import Channel, follow_with, tried
from replica.parallel.messages import Logits, OfAdapters, encode
from replica.parallel.ranks import GroupRanks
from replica.parallel.shares import Share
from replica.transformer import Transformer


class Follower:
    def __init__(self, start: Load, accelerator: Accelerator) -> None:
        self._config = start.config
        self._accelerator = accelerator
        self._share = Share(start.rank, start.config.tensor_parallel_size)
        self._before = accelerator.memory()
        self._windows = [opened(end.window) for end in (start.reads, start.writes)]
        self._channels = [Connection(end.channel) for end in (start.reads, start.writes)]
        for end in (start.reads, start.writes):
            os.close(end.window)
        self._parts: Parts
        self._steps: Steps | None = None
        self._memory: DeviceMemory | None = None
        self._keepers: list[Keeper] = []

    def meet(self, file: Path, backend: str) -> Transformer:
        """Join the group, and load this rank's share."""
        group = DeviceGroup(self._share, file, self._accelerator, backend)
        ranks = GroupRanks(self._share, read_config(Path(self._config.model_path)), group)
        parts = load(self._config, self._accelerator, self._share, ranks)
        self._parts = parts._replace(draw=None)
        return parts.model

    def build(self, blocks: int) -> None:
        self._let_go()
        self._steps, self._memory = self._parts.with_kv(blocks, self._config, self._accelerator, Steps)
        self._steps.rehearse_copy()
        if self._keepers:
            return
        # Blocks are copied from now on when the engine says so.
        for channel, window, name in zip(self._channels, self._windows, ("read", "write"), strict=True):
            self._accelerator.pin(window)

            def copy(blocks: Sequence[int], views: Sequence[memoryview], name: str = name) -> None:
                getattr(self._memory, name)(blocks, views)

            keeper = Keeper(self._accelerator.use, channel, window, self._memory.block_bytes, copy)
            keeper.start()
            self._keepers.append(keeper)

    def _let_go(self) -> None:
        self._steps = self._memory = None
        gc.collect()

    def serve(self, channel: Channel) -> None:
        """Take part in each computation until the engine has ended."""
        model = self._parts.model
        adapters = OwnAdapters(model.adapters, channel)
        while True:
            order = decode_order(channel.recv_bytes())
            if isinstance(order, Build):
                blocks = order.blocks
                tried(channel, lambda: self.build(blocks))  # noqa: B023
            elif isinstance(order, Measure):
                self._let_go()  # the engine has done so, too
                channel.send_bytes(encode(Measured(Span(self._before, self._accelerator.memory()))))
            elif isinstance(order, OfAdapters):
                adapters.obey(order)
            elif isinstance(order, Logits):
                model.logits(torch.empty(order.rows, model.config.hidden_size, dtype=model.dtype, device=model.device))
            elif isinstance(order, Order | Capture):
                assert self._steps is not None, "there is KV before the first step"
                if isinstance(order, Order):
                    self._steps.run(order)
                else:
                    self._steps.capture(order)


def main(
    arguments: Sequence[str], accelerator_of: Callable[[int], Accelerator] = Accelerator, backend: str = NCCL
) -> int:
    @torch.inference_mode()
    def follow(channel: Channel) -> None:
        start = decode_order(channel.recv_bytes())
        assert isinstance(start, Load)
        follower = tried(channel, lambda: Follower(start, accelerator_of(start.rank)))
        meet = decode_order(channel.recv_bytes())
        assert isinstance(meet, Meet)
        tried(channel, lambda: follower.meet(Path(meet.file), backend), lambda model: loaded_with(model.adapters))
        follower.serve(channel)

    return follow_with(arguments, follow)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # torch would take half a second to end
