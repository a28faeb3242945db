"""Measure what LoRA adapters cost on a CPU: decoding and prefill of a small model, with none, one, and one for each.

Adapters have rank 16 in every projection. Rounds go by turns, in one process, on one thread.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from events.blocks import pack_tokens
from replica.clock import WallClock
from replica.config import EngineConfig, LoraModule
from replica.engine import Engine
from replica.lora.files import CONFIG_FILE, WEIGHTS_FILE, shapes_of
from replica.lora.shelf import Shelf
from replica.messages import Output, Sampling, Submit
from replica.model.config import read_config
from replica.native import build_on_cpu
from tests.bench.measure import heading, row
from tests.bench.native import QWEN3, SMALL, make_model

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
    modules = tuple(LoraModule(f"a{number}", str(adapter(folder, number))) for number in range(BATCH))
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


def adapter(model: Path, number: int) -> Path:
    """Write an adapter with random weights, as peft does."""
    folder, config = model / f"adapter{number}", read_config(model)
    folder.mkdir()
    generator = torch.Generator().manual_seed(number)
    weights = {}
    for layer in range(config.num_layers):
        for part, (inputs, outputs) in shapes_of(config).items():
            inside = "mlp" if part in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            for letter, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                name = f"base_model.model.model.layers.{layer}.{inside}.{part}.lora_{letter}.weight"
                weights[name] = torch.empty(shape).normal_(0, 0.02, generator=generator)
    save_file(weights, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return folder


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
