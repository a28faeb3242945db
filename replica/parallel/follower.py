"""A further rank of an engine: `python -m replica.parallel.follower CHANNEL_FD PARENT_PID`.

It does what the engine's process, its parent, says through the channel, and ends with it.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from api.lifeline import die_with_parent
from kernels.backends import choose
from kernels.paged import KvShape
from replica.block_memory import ArrayMemory
from replica.model.config import read_config
from replica.native import NativeRunner, load
from replica.parallel import memory
from replica.parallel.group import Group, RankLostError
from replica.parallel.memory import KvForm
from replica.parallel.messages import Compute, Failed, Logits, Ready, Start, encode, receive_order
from replica.parallel.ranks import GroupRanks
from replica.parallel.shares import Share


def main(arguments: Sequence[str]) -> int:
    channel_fd, parent_pid = map(int, arguments)
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine decides when to end
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s %(message)s")  # the engine says the rest
    with Connection(channel_fd) as channel:
        try:
            return follow(channel)
        except (EOFError, ConnectionError):  # the engine has ended
            return 0


def follow(channel: "Connection[bytes, bytes]") -> int:
    start = receive_order(channel)
    assert isinstance(start, Start)
    try:
        runner = loaded(start)
    except (ValueError, OverflowError, MemoryError, OSError) as error:
        channel.send_bytes(encode(Failed(str(error) or "out of memory")))
        return 1
    channel.send_bytes(encode(Ready()))
    try:
        serve(channel, runner)
    except RankLostError:  # the engine's process hears of it, and ends
        channel.poll(None)
    return 1


def loaded(start: Start) -> NativeRunner:
    config = start.config
    model_config, dtype = read_config(Path(config.model_path)), getattr(torch, config.dtype)
    share = Share(start.rank, config.tensor_parallel_size)
    choice = choose(config.attention, "cpu", KvShape(dtype, config.block_size, model_config.head_dim))
    form = KvForm(share.own(model_config), config.dtype, config.num_blocks, config.block_size, share.size)
    array = memory.attach(start.kv, form)
    group = Group(share, start.exchange, [socket.socket(fileno=peer) for peer in start.peers])
    for descriptor in (start.kv, start.exchange):
        os.close(descriptor)
    model = load(config, model_config, share, GroupRanks(share, model_config, group))
    kv = memory.own_caches(array, form, share), ArrayMemory(array)
    return NativeRunner(model, choice.attention, config.num_blocks, config.block_size, kv)


@torch.inference_mode()
def serve(channel: "Connection[bytes, bytes]", runner: NativeRunner) -> None:
    """Take part in each computation until the engine has ended."""
    model = runner.model
    while True:
        order = receive_order(channel)
        if isinstance(order, Compute):
            runner.compute(np.frombuffer(order.token_ids, np.int64).copy(), order.spans, order.copies, order.adapters)
        elif isinstance(order, Logits):
            model.logits(torch.empty(order.rows, model.config.hidden_size, dtype=model.dtype))


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # torch would take half a second to end
