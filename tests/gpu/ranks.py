"""Small models whose ranks have a GPU each give a CPU's tokens, in graphs and without.

Each case is a process of its own: one that has left NCCL's group cannot join another.
"""

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from replica.engine.engine import Engine
from tests.gpu.apart import Ended, Job, Say, apart, last_line
from tests.gpu.golden import Expected, hear, prompts, same_tokens
from tests.gpu.place import Place
from tests.gpu.report import Table
from tests.replica.models import ask, closing_engine, native, saved

TITLE = "small models on several GPUs"
MODELS = ("llama-odd", "qwen3")
RANKS = (2, 4)
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no graphs": {"graphs": False},
}
QUICK_CHANGES: dict[str, dict[str, Any]] = {"small steps": {"graphs": False, "max_num_batched_tokens": 64}}


def run(place: Place, table: Table) -> None:
    names, numbers = place.size(MODELS, MODELS[-1:]), place.size(RANKS, RANKS[:1])
    changes = place.size(CHANGES, QUICK_CHANGES)
    with TemporaryDirectory() as folder:
        cases = list(product(names, numbers, changes))
        jobs = [job(place, Path(folder), name, ranks, what, changes[what]) for name, ranks, what in cases]
        for number, message in apart(jobs, place.left_s - 2, leads=True):
            if not isinstance(message, Ended):
                hear(table, message.what)
            elif message.error:
                name, ranks, what = cases[number]
                table.check(f"{name}, {ranks} ranks: {what}", False, last_line(message.error))


def job(place: Place, folder: Path, name: str, ranks: int, what: str, changes: dict[str, Any]) -> Job:
    def check(say: Say) -> None:
        table = Table(say)
        title = f"{name}, float32, {ranks} ranks: {what}"
        if place.is_gpu and torch.cuda.device_count() < ranks:
            table.note(title, f"not tried: there are {torch.cuda.device_count()} GPUs")
            return
        torch.set_num_threads(place.threads)
        model, asked = saved(name, folder), prompts()
        expected = Expected(asked, ask(native(model, device="cpu", threads=place.threads), asked))
        with closing_engine(engine_of(place, model, ranks, **changes)) as engine:
            same_tokens(table, title, engine, expected, what)

    return check


def engine_of(place: Place, folder: Path, ranks: int, **changes: Any) -> Engine:
    """Engine as a replica would make it; without GPUs, a substitute."""
    if place.is_gpu:
        return native(folder, device="cuda", tensor_parallel_size=ranks, **changes)
    from tests.replica.device.hosts import on_devices

    return on_devices(folder, ranks, **changes)
