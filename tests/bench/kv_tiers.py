"""Measure a real model whose prompts come from lower media and neighbours: first tokens, and answers.

The model has the shape of Qwen3-0.6B and random weights, on one thread. The neighbour is a replica in processes of its
own, read by TCP over loopback. `--small` takes a smaller shape.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from events.blocks import pack_tokens
from replica.build import build_on_cpu
from replica.cache.lower import DISK, HOST
from replica.cache.moves import PULLED
from replica.config import EngineConfig
from replica.engine.engine import Engine
from replica.messages import KVSource, Output, Sampling, Submit, TokenLogprobs
from replica.model.config import read_config
from replica.process import BESIDE_POLL_S, make_mover, make_neighbours
from replica.runners.clock import WallClock
from tests.bench.measure import heading, row
from tests.bench.native import DTYPES, NEW, PROMPT, QWEN3, SMALL, WARM_UP, http_cost, make_model, tokens
from tests.bench.native import serving as neighbour
from tests.replica.natives import Native

BLOCK = 16
LONGEST = PROMPT + 2 * NEW
BLOCKS = 5 * PROMPT // BLOCK  # of the cache: a prompt, and what the others have
HELD = 8 * BLOCKS  # of the neighbour's cache, of which an eighth may be held for readers
COLD_ROUNDS = 2  # at most
ENDLESS = 30 * NEW  # tokens
TARGETS = {HOST: 20, DISK: 10, PULLED: 10}
FROM = {HOST: "host memory", DISK: "a disk", PULLED: "a neighbour"}
SECRET = "of this benchmark"


class Answer(NamedTuple):
    first_s: float
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    cached: int


def run(rounds: int, *, small: bool = False) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), QWEN3 | (SMALL if small else {}))
        config = read_config(Path(folder))
        print(f"Qwen3 with {config.parameters / 1e6:.0f} M random weights, {config.num_layers} layers\n")
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as disk, serving(Path(folder), dtype, disk) as engine:
                first_tokens(engine, dtype, min(rounds, COLD_ROUNDS))
            with reading(Path(folder), dtype) as (engine, source):
                first_tokens_read(engine, source, dtype, min(rounds, COLD_ROUNDS))


@contextmanager
def serving(folder: Path, dtype: str, disk: str | None) -> Iterator[Engine]:
    """An engine with host memory and a disk, or without both, which reads from neighbours."""
    config = EngineConfig(
        model="bench",
        model_path=str(folder),
        dtype=dtype,  # type: ignore[arg-type]
        num_blocks=BLOCKS,
        host_blocks=2 * BLOCKS if disk else 0,
        disk_kv=disk or "",
        disk_blocks=2 * BLOCKS if disk else 0,
        kv_secret=SECRET,
        kv_read="tcp://127.0.0.1:0",
        max_num_batched_tokens=PROMPT + NEW,
        max_model_len=LONGEST,
        enable_partial_reuse=False,
        events=None,
    )
    runner, clock = build_on_cpu(config), WallClock()
    mover = make_mover(config, runner, clock, None if disk else make_neighbours(config, runner))
    assert mover is not None
    try:
        yield Engine(config, runner, clock, mover)
    finally:
        mover.close()


@contextmanager
def reading(folder: Path, dtype: str) -> Iterator[tuple[Engine, Native]]:
    options = {
        "--served-model-name": "bench",
        "--dtype": dtype,
        "--num-blocks": HELD,
        "--max-model-len": LONGEST,
        "--max-num-batched-tokens": PROMPT + NEW,
        "--host-kv-gb": 0,
        "--kv-port": 0,
    }
    given = [each for option in options.items() for each in option]
    with neighbour(folder, *given, WARMROUTE_KV_SECRET=SECRET) as source, serving(folder, dtype, None) as engine:
        yield engine, source


def first_tokens(engine: Engine, dtype: str, rounds: int) -> None:
    chance, vocabulary = Random(0), engine.runner.vocab_size
    ask(engine, tokens(chance, WARM_UP, vocabulary))
    cold_s: list[float] = []
    warm_s: dict[str, list[float]] = {HOST: [], DISK: []}
    for _ in range(rounds):
        prompt = tokens(chance, PROMPT, vocabulary)
        cold = ask(engine, prompt)
        cold_s.append(cold.first_s)
        for medium, times_s in warm_s.items():
            empty(engine, above=medium)
            times_s.append(warm_first_s(engine, dtype, prompt, cold))
    report(dtype, cold_s, warm_s)


def first_tokens_read(engine: Engine, source: Native, dtype: str, rounds: int) -> None:
    chance, vocabulary = Random(2), engine.runner.vocab_size
    ask(engine, tokens(chance, WARM_UP, vocabulary))
    cold_s: list[float] = []
    read_s: list[float] = []
    for _ in range(rounds):
        prompt = tokens(chance, PROMPT, vocabulary)
        http_cost(source, prompt)
        cold = ask(engine, prompt)
        cold_s.append(cold.first_s)
        empty(engine, above=PULLED)
        read_s.append(warm_first_s(engine, dtype, prompt, cold, source))
    report(dtype, cold_s, {PULLED: read_s})


def warm_first_s(engine: Engine, dtype: str, prompt: list[int], cold: Answer, source: Native | None = None) -> float:
    warm = ask(engine, prompt, source=source)
    assert warm.cached == PROMPT - BLOCK, f"{warm.cached} tokens came back"
    assert dtype != "float32" or (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs), "other answers"
    return warm.first_s


def report(dtype: str, cold_s: list[float], warm_s: dict[str, list[float]]) -> None:
    heading(f"first token after {PROMPT:,} tokens, {dtype}")
    row("cold", [1000 * one for one in cold_s], "ms")
    for medium, times_s in warm_s.items():
        row(f"from {FROM[medium]}", [1000 * one for one in times_s], "ms")
        sooner = [cold / warm for cold, warm in zip(cold_s, times_s, strict=True)]
        row(f"from {FROM[medium]}: sooner than cold", sooner, "times", f">= {TARGETS[medium]}")
    print(flush=True)


def ask(engine: Engine, prompt: list[int], new: int = NEW, source: Native | None = None) -> Answer:
    """Answer one request, alone."""
    sources = sources_of(source)
    began_s = time.perf_counter()
    submit(engine, 1, prompt, new, sources)
    outputs: list[Output] = []
    first_s = 0.0
    while engine.busy:
        for output in engine.step():
            first_s = first_s or time.perf_counter() - began_s
            outputs.append(output)
        if engine.only_loads:
            time.sleep(BESIDE_POLL_S)
    got = [token for output in outputs for token in output.token_ids]
    logprobs = [one for output in outputs for one in output.logprobs or ()]
    return Answer(first_s, got, logprobs, outputs[0].cached_tokens)


def sources_of(source: Native | None) -> list[KVSource]:
    return [] if source is None else [KVSource(source.load()["kv_read"], PROMPT)]


def submit(engine: Engine, number: int, prompt: list[int], new: int, sources: Sequence[KVSource] = ()) -> None:
    sampling = Sampling(max_tokens=new, temperature=0.0, top_logprobs=5, ignore_eos=True)
    refused = engine.submit(Submit(number, pack_tokens(prompt), sampling, sources=list(sources)))
    assert refused is None, refused


def empty(engine: Engine, above: str) -> None:
    """Let nothing above this medium have what it has: the pool's blocks are given to nobody."""
    settle(engine)
    blocks = engine.pool.take((), engine.pool.free)
    assert blocks is not None
    settle(engine)
    engine.pool.release(blocks)
    if above == DISK:
        lower = engine.pool.lower
        assert lower is not None
        lower.drop(lower.host.slots().tolist())


def settle(engine: Engine) -> None:
    """Wait until all that was saved has come to the disk."""
    engine.settle()
    while engine.pool.lower is not None and engine.pool.lower.writing:
        time.sleep(0.01)
        engine.settle()
