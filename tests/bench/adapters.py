"""Measure what LoRA adapters cost on a CPU: decoding and prefill of a small model, with none, one, and one for each.

Adapters have rank 16 in every projection. Rounds go by turns, in one process, on one thread.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from events.blocks import pack_tokens
from replica.build import build_on_cpu
from replica.config import EngineConfig, LoraModule
from replica.engine.engine import Engine
from replica.lora.shelf import Shelf
from replica.messages import Output, Sampling, Submit
from replica.model.config import read_config
from replica.runners.clock import WallClock
from tests.bench.measure import heading, row
from tests.bench.native import QWEN3, SMALL, make_model
from tests.replica.lora.random_adapter import write_adapter

RANK = 16
BATCH, PROMPT, NEW = 8, 512, 32
CASES: dict[str, tuple[str | None, ...]] = {
    "no adapter": (None,),
    "one adapter for all": ("a0",),
    "half of them with one": ("a0", None),
    "an adapter for each": tuple(f"a{number}" for number in range(BATCH)),
}


def run(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-adapters-") as folder:
        engine = made(Path(folder))
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
        for number in range(rounds + 1):  # the first one warms up
            for name, adapters in CASES.items():
                found = measured(engine, adapters, number)
                if number:
                    figures[name].append(found)
    heading(f"Qwen3, {SMALL['num_hidden_layers']} layers of {SMALL['hidden_size']}, float32, one thread, rank {RANK}")
    for what, index, unit in (("prefill", 0, "tok/s"), (f"decode, batch {BATCH}", 1, "tok/s")):
        plain = statistics.median(pair[index] for pair in figures["no adapter"])
        for name, pairs in figures.items():
            speeds = [pair[index] for pair in pairs]
            row(f"{what}: {name} ({statistics.median(speeds) / plain:.2f} of the speed without)", speeds, unit)


def made(folder: Path) -> Engine:
    make_model(folder, QWEN3 | SMALL)
    shape = read_config(folder)
    folders = [write_adapter(folder / f"adapter{number}", shape, RANK, number) for number in range(BATCH)]
    modules = tuple(LoraModule(f"a{number}", str(one)) for number, one in enumerate(folders))
    config = EngineConfig(
        model="bench",
        model_path=str(folder),
        num_blocks=2 * BATCH * (PROMPT + NEW) // 16,
        max_num_batched_tokens=PROMPT,
        max_model_len=PROMPT + 2 * NEW,
        enable_prefix_caching=False,
        lora_modules=modules,
        events=None,
    )
    runner = build_on_cpu(config)
    assert runner.adapters is not None
    return Engine(config, runner, WallClock(), None, Shelf(runner.adapters, BATCH))


def measured(engine: Engine, adapters: Sequence[str | None], seed: int) -> tuple[float, float]:
    """Tokens per CPU second of prompts, and of decoding them together."""
    chance = random.Random(seed)
    sampling = Sampling(max_tokens=NEW, temperature=0.0)
    for number in range(BATCH):
        prompt = [chance.randrange(SMALL["vocab_size"]) for _ in range(PROMPT)]
        name = adapters[number % len(adapters)]
        assert engine.submit(Submit(number, pack_tokens(prompt), sampling, lora_name=name)) is None
    began_s = time.process_time()
    while engine.scheduler.waiting or any(request.remaining > 1 for request in engine.scheduler.running):
        engine.step()
    prefilled_s = time.process_time()
    tokens = sum(len(output.token_ids) for output in drained(engine))
    return BATCH * PROMPT / (prefilled_s - began_s), tokens / (time.process_time() - prefilled_s)


def drained(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.busy:
        outputs += engine.step()
    return outputs
