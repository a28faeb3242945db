"""A further rank of an engine on GPUs: `python -m replica.device.follower CHANNEL_FD PARENT_PID`.

It does what the engine's process, its parent, says through the channel, and ends with it.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from api.process.lifeline import die_with_parent
from replica.device.accelerator import Accelerator, Span
from replica.device.orders import (
    Build,
    Capture,
    Failed,
    Load,
    Logits,
    Measure,
    Measured,
    Meet,
    Order,
    Ready,
    decode_order,
    encode,
)
from replica.device.parts import Parts, load
from replica.device.ranks import NCCL, DeviceGroup, GroupRanks
from replica.device.steps import Steps
from replica.model.config import read_config
from replica.model.shares import Share
from replica.transformer import Transformer

Channel: TypeAlias = "Connection[bytes, bytes]"
Result = TypeVar("Result")


class Follower:
    def __init__(self, start: Load, accelerator: Accelerator) -> None:
        self._config = start.config
        self._accelerator = accelerator
        self._share = Share(start.rank, start.config.tensor_parallel_size)
        self._before = accelerator.memory()
        self._parts: Parts
        self._steps: Steps | None = None

    def meet(self, file: Path, backend: str) -> Transformer:
        group = DeviceGroup(self._share, file, self._accelerator, backend)
        ranks = GroupRanks(self._share, read_config(Path(self._config.model_path)), group)
        parts = load(self._config, self._accelerator, ranks)
        self._parts = parts._replace(draw=None)
        return parts.model

    def build(self, blocks: int) -> None:
        self._let_go()
        self._steps, _ = self._parts.with_kv(blocks, self._config, self._accelerator, Steps)
        self._steps.rehearse_copy()

    def _let_go(self) -> None:
        self._steps = None
        gc.collect()

    def serve(self, channel: Channel) -> None:
        """Take part in each computation until the engine has ended."""
        model = self._parts.model
        while True:
            order = decode_order(channel.recv_bytes())
            if isinstance(order, Build):
                blocks = order.blocks
                tried(channel, lambda: self.build(blocks))  # noqa: B023
            elif isinstance(order, Measure):
                self._let_go()  # the engine has done so, too
                channel.send_bytes(encode(Measured(Span(self._before, self._accelerator.memory()))))
            elif isinstance(order, Logits):
                model.logits(torch.empty(order.rows, model.config.hidden_size, dtype=model.dtype, device=model.device))
            elif isinstance(order, Order | Capture):
                assert self._steps is not None, "there is KV before the first step"
                if isinstance(order, Order):
                    self._steps.run(order)
                else:
                    self._steps.capture(order)


class CannotFollow(Exception):
    """The engine has been told why."""


def tried(
    channel: Channel, prepare: Callable[[], Result], answer_of: Callable[[Result], Ready] = lambda _: Ready()
) -> Result:
    """Tell the engine that this is done, or why it cannot be."""
    try:
        result = prepare()
    except (ValueError, OverflowError, MemoryError, OSError, RuntimeError) as error:
        channel.send_bytes(encode(Failed(str(error) or "out of memory")))
        raise CannotFollow from error
    channel.send_bytes(encode(answer_of(result)))
    return result


@torch.inference_mode()
def follow(channel: Channel, accelerator_of: Callable[[int], Accelerator], backend: str) -> None:
    start = decode_order(channel.recv_bytes())
    assert isinstance(start, Load)
    follower = tried(channel, lambda: Follower(start, accelerator_of(start.rank)))
    meet = decode_order(channel.recv_bytes())
    assert isinstance(meet, Meet)
    tried(
        channel,
        lambda: follower.meet(Path(meet.file), backend),
        lambda model: Ready({name: one.digest for name, one in model.adapters.loaded.items()}),
    )
    follower.serve(channel)


def main(
    arguments: Sequence[str], accelerator_of: Callable[[int], Accelerator] = Accelerator, backend: str = NCCL
) -> int:
    """Return the exit status, once the engine is gone or this rank is of no use."""
    channel_fd, parent_pid = map(int, arguments)
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine decides when to end
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s %(message)s")  # the engine says the rest
    with Connection(channel_fd) as channel:
        try:
            follow(channel, accelerator_of, backend)
        except (EOFError, ConnectionError):  # the engine has ended
            return 0
        except CannotFollow:
            return 1
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # torch would take half a second to end
