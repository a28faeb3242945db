"""Adapters of several ranks on the device, one of them too wide for graphs: the tokens are a CPU's."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from replica.config import LoraModule
from replica.engine.engine import Engine
from replica.model.config import read_config
from tests.gpu.golden import engine_of, equal
from tests.gpu.place import Place
from tests.gpu.report import Table
from tests.replica.lora.random_adapter import write_adapter
from tests.replica.models import VOCABULARY, finish, native, saved, submit

TITLE = "adapters that change every projection of a small model"
MODEL = "qwen3"
RANKS = {"narrow": 4, "usual": 16, "wide": 100}
LENGTHS = (1, 7, 40, 100)


def run(place: Place, table: Table) -> None:
    with TemporaryDirectory() as folder:
        model = saved(MODEL, Path(folder))
        modules = [
            LoraModule(name, str(write_adapter(Path(folder) / name, read_config(model), rank, rank, 0.15)))
            for name, rank in RANKS.items()
        ]
        changes: dict[str, Any] = {"lora_modules": tuple(modules)}
        expected = answers(native(model, device="cpu", threads=place.threads, **changes))
        others: dict[str, Any] = {"no graphs": {"graphs": False}, "chunks": {"max_num_batched_tokens": 23}}
        for what, other in {"graphs": {}, **others}.items():
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
