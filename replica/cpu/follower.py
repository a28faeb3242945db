"""A further rank of an engine on a CPU: see `replica.parallel.following`."""

import os
import socket
import sys
from pathlib import Path

import numpy as np
import torch

from kernels.backends import choose
from kernels.paged import KvShape
from replica.cpu.runner import NativeRunner, load
from replica.model.config import read_config
from replica.parallel.adapters import OwnAdapters, loaded_with
from replica.parallel.following import Channel, follow_with, tried
from replica.parallel.group import Group, RankLostError
from replica.parallel.memory import attach, kv_form
from replica.parallel.messages import Compute, Logits, Start, decode_order
from replica.parallel.ranks import GroupRanks
from replica.parallel.shares import Share


def follow(channel: Channel) -> None:
    start = decode_order(channel.recv_bytes())
    assert isinstance(start, Start)
    runner = tried(channel, lambda: loaded(start), lambda runner: loaded_with(runner.model.adapters))
    try:
        serve(channel, runner)
    except RankLostError:  # the engine's process hears of it, and ends
        channel.poll(None)


def loaded(start: Start) -> NativeRunner:
    config = start.config
    model_config, dtype = read_config(Path(config.model_path)), getattr(torch, config.dtype)
    share = Share(start.rank, config.tensor_parallel_size)
    choice = choose(config.attention, "cpu", KvShape(dtype, config.block_size, model_config.head_dim))
    form = kv_form(config, model_config, share)
    kv = attach(start.kv, form)
    group = Group(share, start.exchange, [socket.socket(fileno=peer) for peer in start.peers])
    for descriptor in (start.kv, start.exchange):
        os.close(descriptor)
    model = load(config, model_config, share, GroupRanks(share, model_config, group))
    return NativeRunner(model, choice.attention, form, kv)


@torch.inference_mode()
def serve(channel: Channel, runner: NativeRunner) -> None:
    """Take part in each computation until the engine has ended."""
    model, adapters = runner.model, OwnAdapters(runner.model.adapters, channel)
    while True:
        order = decode_order(channel.recv_bytes())
        if isinstance(order, Compute):
            runner.compute(np.frombuffer(order.token_ids, np.int64).copy(), order.spans, order.copies, order.adapters)
        elif isinstance(order, Logits):
            model.logits(torch.empty(order.rows, model.config.hidden_size, dtype=model.dtype))
        elif not isinstance(order, Start):
            adapters.obey(order)


if __name__ == "__main__":
    os._exit(follow_with(sys.argv[1:], follow))  # torch would take half a second to end
