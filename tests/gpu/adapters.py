"""Adapters on the device: the tokens are a CPU's, and what they cost a step.

A small model in float32 has adapters of several ranks, one of them too wide for graphs. Then requests to a larger model
decode, and prompts come in between, with no adapter, the same one, or each with its own.
"""

import random
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from replica.config import LoraModule
from replica.device.sizes import Limits
from replica.engine.engine import Engine
from replica.model.config import read_config
from tests.gpu.engines import BLOCK, made, runner_of
from tests.gpu.golden import engine_of, equal
from tests.gpu.place import Place
from tests.gpu.report import Figures, Table
from tests.gpu.steps import STEPS, Patient, Watched, steps_of
from tests.replica.lora.random_adapter import write_adapter
from tests.replica.models import VOCABULARY, finish, native, saved, submit
from tests.replica.shapes import QWEN3_06B

TITLE = "adapters that change every projection; steps are those of a Qwen3-0.6B with random weights, and rank 16"
MODEL = "qwen3"
RANKS = {"narrow": 4, "usual": 16, "wide": 100}
LENGTHS = (1, 7, 40, 100)
RANK, MOST = 16, 16
BATCHES, CONTEXT, PROMPT = (32, 128), 512, 600


def run(place: Place, table: Table) -> None:
    with TemporaryDirectory() as folder:
        compare(place, table, Path(folder))
        measure(place, table, Path(folder))


def compare(place: Place, table: Table, folder: Path) -> None:
    model = saved(MODEL, folder)
    modules = [
        LoraModule(name, str(write_adapter(folder / name, read_config(model), rank, rank, 0.15)))
        for name, rank in RANKS.items()
    ]
    changes: dict[str, Any] = {"lora_modules": tuple(modules), "max_loras": len(modules)}
    expected = answers(native(model, device="cpu", threads=place.threads, **changes))
    for what, other in (("graphs", {}), ("no graphs", {"graphs": False}), ("chunks", {"max_num_batched_tokens": 23})):
        engine = engine_of(place, model, **changes, **other)
        for times in ("", ", cached"):
            found = answers(engine)
            table.check(f"{MODEL}, float32: {what}{times}", found == expected, *equal(found, expected))


def answers(engine: Engine) -> list[list[int]]:
    """The tokens that follow some prompts, with each adapter and without."""
    chance = random.Random(1)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    asked = [(name, prompt) for prompt in prompts for name in (None, *RANKS)]
    for number, (name, prompt) in enumerate(asked):
        submit(engine, number, prompt, lora_name=name)
    found = finish(engine)
    return [found[number].token_ids for number in range(len(asked))]


def measure(place: Place, table: Table, folder: Path) -> None:
    batches, context, prompt = place.size((BATCHES, CONTEXT, PROMPT), ((4,), 24, 40))
    limits = Limits(place.size(2048, 128), max(batches) + 2, max(context + STEPS, prompt) + BLOCK, MOST)
    accelerator = Patient(place.accelerator())
    of = made(place, QWEN3_06B, limits.tokens, accelerator)
    adapter = write_adapter(folder / "adapter", of.model.config, RANK, 1)
    names = [f"a{number}" for number in range(MOST)]
    for name in names:
        of.model.adapters.loaded[name] = of.model.adapters.read(name, adapter)
    runner = runner_of(of, of.caches_of(limits.requests * -(-limits.tokens // BLOCK)), limits)
    for batch, length in product(batches, (0, prompt)):
        where = f"batch {batch} beside a prompt of {length} tokens" if length else f"batch {batch}"
        plain_ms = 0.0
        for what, adapters in (("no adapter", [None]), ("one adapter", names[:1]), (f"{MOST} adapters", names)):
            watched = Watched(runner, place)
            split = steps_of(watched, accelerator, limits, batch, context, prompt=length, adapters=adapters)
            step_ms = 1000 * Figures(split.whole).median
            table.figure(f"{where}, {what}: a step", [step_ms], "ms")
            if plain_ms:
                table.figure(f"{where}, {what}: of a step without", [step_ms / plain_ms], "times")
            plain_ms = plain_ms or step_ms
