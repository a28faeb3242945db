"""Measure how much longer others' steps take while a prompt comes from lower media or a neighbour (see `kv_tiers`)."""

import statistics
import tempfile
import time
from pathlib import Path
from random import Random

import torch

from replica.cache.lower import DISK, HOST
from replica.cache.moves import PULLED
from replica.engine.engine import Engine
from replica.messages import KVSource
from tests.bench.kv_tiers import ENDLESS, FROM, ask, empty, reading, serving, sources_of, submit
from tests.bench.measure import heading, row
from tests.bench.native import DTYPES, PROMPT, QWEN3, SMALL, WARM_UP, http_cost, make_model, tokens
from tests.replica.natives import Native

STEPS = 4  # of decoding, before there are as many of the other kind: a machine's speed changes within seconds
TURNS = 6  # in a round
OTHERS = 4  # that decode meanwhile
LOADED = 100  # number of the request that is loaded
MAX_SLOWER = 5.0  # per cent


def run(rounds: int, *, small: bool = False) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), QWEN3 | (SMALL if small else {}))
        for dtype in DTYPES:
            with reading(Path(folder), dtype) as (engine, source):
                beside_loads(engine, dtype, PULLED, rounds, source)
            with tempfile.TemporaryDirectory() as disk, serving(Path(folder), dtype, disk) as engine:
                for medium in (HOST, DISK):
                    beside_loads(engine, dtype, medium, rounds)


def beside_loads(engine: Engine, dtype: str, medium: str, rounds: int, source: Native | None = None) -> None:
    """Decode a batch; then the same while a prompt is loaded over and over, of which nothing is computed."""
    chance, vocabulary = Random(1), engine.runner.vocab_size
    prompt = tokens(chance, PROMPT, vocabulary)
    if source is None:
        ask(engine, prompt, 1)
    else:
        http_cost(source, prompt)
    slower = []
    for _ in range(rounds):
        for number in range(OTHERS):
            submit(engine, 10 + number, tokens(chance, WARM_UP, vocabulary), ENDLESS)
        while engine.scheduler.queued_prefill_tokens():
            engine.step()
        alone_s: list[float] = []
        beside_s: list[float] = []
        for _ in range(TURNS):
            alone_s += [step_s(engine) for _ in range(STEPS)]
            beside_s += steps_while_loading_s(engine, prompt, medium, sources_of(source))
        slower.append(100 * (statistics.median(beside_s) / statistics.median(alone_s) - 1))
        for request in list(engine.scheduler.requests):
            engine.cancel(request)
        while engine.busy:
            engine.step()
    heading(f"decoding of {OTHERS} others while {PROMPT:,} tokens come from {FROM[medium]}, {dtype}")
    row("a step takes longer", slower, "%", f"< {MAX_SLOWER:g}")
    print(flush=True)


def step_s(engine: Engine) -> float:
    began_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - began_s


def steps_while_loading_s(engine: Engine, prompt: list[int], medium: str, sources: list[KVSource]) -> list[float]:
    """Durations of steps during which blocks were loaded; the first one of a load admits the request."""
    found: list[float] = []
    while len(found) < STEPS:
        empty(engine, above=medium)
        submit(engine, LOADED, prompt, 1, sources)
        found.append(step_s(engine))
        while engine.scheduler.transfers and len(found) < STEPS:
            found.append(step_s(engine))
        engine.cancel(LOADED)
        while engine.scheduler.transfers:
            engine.step()
    assert len(engine.scheduler.running) == OTHERS, "the others have ended: give them more to generate"
    return found
