"""Small models whose ranks have a GPU each give a CPU's tokens, in graphs and without, and from host memory."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from replica.engine import Engine
from tests.gpu.golden import Expected, prompts, same_tokens
from tests.gpu.place import Place
from tests.gpu.report import Table
from tests.replica.models import ask, native, saved
from tests.replica.parallel.conftest import closing_engine

TITLE = "small models on several GPUs"
MODELS = ("llama-odd", "qwen3")
RANKS = (2, 4)
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no graphs": {"graphs": False},
    "host memory": {"num_blocks": 14, "host_blocks": 64},
}
QUICK_CHANGES: dict[str, dict[str, Any]] = {"small steps": {"graphs": False, "max_num_batched_tokens": 64}}


def run(place: Place, table: Table) -> None:
    there = torch.cuda.device_count() if place.is_gpu else RANKS[0]
    if there < RANKS[0]:
        table.note("ranks", "there is one GPU: nothing was tried")
        return
    with TemporaryDirectory() as folder:
        for name in place.size(MODELS, MODELS[-1:]):
            model = saved(name, Path(folder))
            asked = prompts()
            expected = Expected(asked, ask(native(model, device="cpu", threads=place.threads), asked))
            for ranks in (ranks for ranks in RANKS if ranks <= there):
                for what, changes in place.size(CHANGES, QUICK_CHANGES).items():
                    with closing_engine(engine_of(place, model, ranks, **changes)) as engine:
                        same_tokens(table, f"{name}, float32, {ranks} ranks: {what}", engine, expected, what)


def engine_of(place: Place, folder: Path, ranks: int, **changes: Any) -> Engine:
    """Engine as a replica would make it; without GPUs, a substitute."""
    if place.is_gpu:
        return native(folder, device="cuda", tensor_parallel_size=ranks, **changes)
    from tests.replica.device.hosts import on_devices

    return on_devices(folder, ranks, **changes)
