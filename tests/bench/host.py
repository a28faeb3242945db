"""Measure the host's share of a GPU step that is a graph, without launches and the GPU's own work.

The runner is that of a GPU, on a CPU; its graphs are replaced by nothing.
"""

import random
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from replica.device.orders import Size, mixed_sizes, size_for
from replica.device.runner import DeviceRunner
from tests.bench.measure import cpu_us, heading, row
from tests.replica.device.hosts import on_device
from tests.replica.models import VOCABULARY, saved, submit

PROMPT = 100
STEPS = 64
NEW = 40  # tokens of the prompt that comes new in each step, where one does
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


def run(rounds: int) -> None:
    heading("host work per GPU step, CPU")
    with tempfile.TemporaryDirectory() as folder:
        model = saved("llama", Path(folder))
        for kind, sampling in KINDS.items():
            for batch in (1, 32, 128, 256):
                target = "< 1" if batch == 128 else ""
                row(f"{batch} requests decode, {kind}", steps(model, batch, sampling, rounds), "ms", target)
        beside = steps(model, 128, KINDS["greedy"], rounds, new=NEW)
        row(f"128 greedy requests decode, plus a new prompt of {NEW} tokens", beside, "ms", "< 1")
    print()


def steps(model: Path, batch: int, sampling: dict[str, Any], rounds: int, new: int = 0) -> list[float]:
    engine = on_device(model, max_num_seqs=batch + 2, num_blocks=64 * (batch + 2), max_num_batched_tokens=4096)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    if new:
        config = runner.model.config
        rows = size_for(mixed_sizes(runner.limits.rows, config.parameters // config.num_layers), batch + new)
        assert rows is not None, f"{batch + new} rows do not fit into a graph"
        runner.capture(Size(True, rows))
    runner.steps.graphs = dict.fromkeys(runner.steps.graphs, lambda: None)
    chance = random.Random(batch)
    for number in range(batch):
        prompt = [chance.randrange(VOCABULARY) for _ in range(PROMPT)]
        submit(engine, number, prompt, max_tokens=1000, top_logprobs=None, ignore_eos=True, seed=number, **sampling)
    numbers = count(batch)
    while any(request.remaining > 1 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()

    def work() -> None:
        for _ in range(STEPS):
            if new:
                prompt = [chance.randrange(VOCABULARY) for _ in range(new)]
                submit(engine, next(numbers), prompt, max_tokens=1, top_logprobs=None)
            engine.step()

    return [figure / 1000 for figure in cpu_us(lambda: work, STEPS, rounds)]
