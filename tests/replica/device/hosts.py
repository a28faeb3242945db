"""The runner of a GPU, on a CPU: its kernels in plain torch, and graphs that rerun the captured function."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.plain import PlainAttention
from kernels.sampling import draw
from replica.config import EngineConfig
from replica.device.accelerator import Accelerator, Memory, Replay, Uploads, Wait
from replica.device.build import capture_all, layers_of, limits_of, new_caches, sizes_of
from replica.device.memory import DeviceMemory
from replica.device.runner import DeviceRunner
from replica.device.sizes import Size
from replica.engine.engine import Engine
from replica.model.config import read_config
from replica.model.weights import Weights
from replica.transformer import Transformer
from tests.replica.models import config_of, engine_of

POISON = 0x7F
FEW_ROWS = 64  # of graphs with prompts: plain torch takes its time for what fills up a larger one


class HostAccelerator(Accelerator):
    """Results are there at once, but may be read only after a wait."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.replays = 0
        self.waits = 0

    def use(self) -> None:
        pass

    @property
    def name(self) -> str:
        return "a CPU"

    def memory(self) -> Memory:
        return Memory(1 << 40, 1 << 40, 0)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return 0

    def host_bytes(self, size: int) -> Tensor:
        return torch.full((size,), POISON, dtype=torch.uint8)

    def pin(self, memory: memoryview) -> bool:  # noqa: ARG002
        return True

    def mark(self) -> Wait:
        def wait() -> None:
            self.waits += 1

        return wait

    def beside(self) -> Callable[[Callable[[], object]], None]:
        def run(work: Callable[[], object]) -> None:
            work()

        return run

    def pool(self) -> object:
        return None

    def capture(self, run: Callable[[], object], pool: object) -> Replay:  # noqa: ARG002
        def replay() -> None:
            self.replays += 1
            run()

        return replay


def runner_of(config: EngineConfig, accelerator: HostAccelerator) -> DeviceRunner:
    folder = Path(config.model_path)
    with Weights(folder, getattr(torch, config.dtype), Uploads(accelerator).send) as weights:
        model = Transformer(read_config(folder), weights, config.max_model_len)
        weights.finish()
    model.adapters.load_named(config)
    memory = new_caches(model, config.num_blocks + 1, config.block_size)
    limits = limits_of(config)
    blocks = DeviceMemory(memory, accelerator)
    runner = DeviceRunner(model, PlainAttention(), draw, layers_of(memory), limits, accelerator, blocks)
    if config.graphs:
        capture_all(runner, few(sizes_of(limits, model.config)))
    return runner


def on_device(folder: Path, accelerator: HostAccelerator | None = None, **changes: Any) -> Engine:
    """As `tests.replica.models.native`, and ahead of what it knows."""
    config = config_of(folder, **changes)
    runner = runner_of(config, accelerator) if accelerator else _kept(config)
    return engine_of(config, runner)


def few(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    return tuple(size for size in sizes if not size.mixed or size.rows <= FEW_ROWS)


@cache
def _kept(config: EngineConfig) -> DeviceRunner:
    """Capturing takes longer than most tests, and a runner without requests is as good as a new one."""
    return runner_of(config, HostAccelerator())
