"""Measure a model's ranks: one sum over them beside gloo's, and tokens per second beside threads of one process.

By wall clock, as ranks wait for each other: on a machine without other work.
"""

import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as distributed
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from events.blocks import pack_tokens
from replica.build import build_on_cpu
from replica.config import DType, EngineConfig
from replica.engine.engine import Engine
from replica.messages import Sampling, Submit
from replica.parallel import memory
from replica.parallel.group import Group, connected, memory_size
from replica.parallel.shares import Share
from replica.runners.clock import WallClock
from tests.bench.measure import heading, row
from tests.bench.native import QWEN3, make_model

LAYERS, VOCABULARY = 14, 65_536
WIDTH = 1024
SUMS = 50
PROMPT, NEW = 512, 24
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
SHAPES = ((1, 1), (1, 2), (2, 2))  # ranks, and the threads of all


def run(rounds: int) -> None:
    heading("one sum over all ranks, float32 rows of 1,024")
    for size in (2, 4):
        for rows in (1, 512):
            for name, seconds in zip(KINDS, sums(size, rows, rounds), strict=True):
                row(f"{size} ranks, {rows} rows: {name}", [1000 * one for one in seconds], "ms")
    heading(f"Qwen3, {LAYERS} layers of {WIDTH}")
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        made = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
        make_model(Path(folder), QWEN3 | made)
        for dtype in DTYPES:
            speeds: dict[tuple[int, int], list[tuple[float, float, float]]] = {shape: [] for shape in SHAPES}
            for _ in range(rounds):
                for shape, found in speeds.items():
                    found.append(speed(Path(folder), dtype, *shape))
            for (ranks, threads), found in speeds.items():
                for index, what in enumerate(("prompt", "one answer", "eight answers")):
                    row(f"{dtype}, {ranks} ranks, {threads} threads: {what}", [one[index] for one in found], "tok/s")


# ---- sums

Add = Callable[[Tensor], object]


def ours(rank: int, size: int, exchange: int, peers: list[socket.socket], _: str) -> Add:
    return Group(Share(rank, size), exchange, peers).sum


def all_reduce(rank: int, size: int, _: int, __: list[socket.socket], folder: str) -> Add:
    _meet(rank, size, folder)
    return distributed.all_reduce


def gathered(rank: int, size: int, _: int, __: list[socket.socket], folder: str) -> Add:
    """An all-gather, added in the order of ranks, as ours does."""
    _meet(rank, size, folder)

    def add(partial: Tensor) -> None:
        parts = [torch.empty_like(partial) for _ in range(size)]
        distributed.all_gather(parts, partial)
        torch.add(parts[0], parts[1], out=partial)
        for part in parts[2:]:
            partial.add_(part)

    return add


KINDS = {"gloo, all-reduce": all_reduce, "gloo, all-gather and adding": gathered, "shared memory": ours}


def _meet(rank: int, size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = FileStore(f"{folder}/meet", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)


def sums(size: int, rows: int, rounds: int) -> list[list[float]]:
    """Seconds of one sum, in each round, of each kind."""
    return [_sums(kind, size, rows, rounds) for kind in KINDS.values()]


def _sums(kind: Callable[..., Add], size: int, rows: int, rounds: int) -> list[float]:
    fork = multiprocessing.get_context("fork")
    exchange, peers = memory.create(memory_size(size)), connected(size)
    ours, theirs = fork.Pipe()
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:

        def rank_of(rank: int) -> None:
            torch.set_num_threads(1)
            add, partial = kind(rank, size, exchange, peers[rank], folder), torch.ones(rows, WIDTH)
            found = []
            for _ in range(rounds + 1):  # the first one warms up
                began_s = time.perf_counter()
                for _ in range(SUMS):
                    add(partial.fill_(1.0))
                found.append((time.perf_counter() - began_s) / SUMS)
            if rank == 0:
                theirs.send(found[1:])
            os._exit(0)

        processes = [fork.Process(target=rank_of, args=[rank]) for rank in range(size)]
        for process in processes:
            process.start()
        found: list[float] = ours.recv()
        for process in processes:
            process.join()
    os.close(exchange)
    return found


# ---- tokens


def speed(folder: Path, dtype: DType, ranks: int, threads: int) -> tuple[float, float, float]:
    """Tokens per second of a prompt, of one answer and of eight."""
    config = EngineConfig(
        model="bench",
        model_path=str(folder),
        dtype=dtype,
        num_blocks=512,
        max_model_len=2 * PROMPT,
        tensor_parallel_size=ranks,
        threads=threads,
        events=None,
    )
    runner = build_on_cpu(config)
    try:
        engine = Engine(config, runner, WallClock())
        taken_s(engine, 1, 16, 4)  # warms up
        prompt_s = statistics.median(taken_s(engine, 1, PROMPT, 1) for _ in range(3))
        return PROMPT / prompt_s, NEW / taken_s(engine, 1, 16, NEW), 8 * NEW / taken_s(engine, 8, 16, NEW)
    finally:
        runner.close()


def taken_s(engine: Engine, requests: int, prompt: int, new: int) -> float:
    sampling = Sampling(max_tokens=new, temperature=0.0)
    for number in range(requests):
        tokens = [random.randrange(VOCABULARY) for _ in range(prompt)]
        assert engine.submit(Submit(number, pack_tokens(tokens), sampling)) is None
    began_s = time.perf_counter()
    while engine.busy:
        engine.step()
    return time.perf_counter() - began_s
