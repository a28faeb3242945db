"""What the host does in a step of a GPU in which all requests decode, without launches and the GPU's own work.

The runner is that of a GPU, on a CPU; its graphs are replaced by nothing.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

from replica.device.runner import DeviceRunner
from tests.bench.measure import cpu_us, heading, row
from tests.replica.device.hosts import on_device
from tests.replica.models import VOCABULARY, saved, submit

PROMPT = 100
STEPS = 64
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


def run(rounds: int) -> None:
    heading("the host's part of a decoding step of a GPU, CPU")
    with tempfile.TemporaryDirectory() as folder:
        model = saved("llama", Path(folder))
        for kind, sampling in KINDS.items():
            for batch in (1, 32, 128, 256):
                target = "< 1" if batch == 128 else ""
                row(f"{batch} requests, {kind}", decoding(model, batch, sampling, rounds), "ms", target)
    print()


def decoding(model: Path, batch: int, sampling: dict[str, Any], rounds: int) -> list[float]:
    engine = on_device(model, max_num_seqs=batch, num_blocks=64 * batch, max_num_batched_tokens=4096)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    runner._graphs = dict.fromkeys(runner._graphs, lambda: None)
    chance = random.Random(batch)
    for number in range(batch):
        prompt = [chance.randrange(VOCABULARY) for _ in range(PROMPT)]
        submit(engine, number, prompt, max_tokens=1000, top_logprobs=None, ignore_eos=True, seed=number, **sampling)
    while any(request.remaining > 1 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()

    def work() -> None:
        for _ in range(STEPS):
            engine.step()

    return [figure / 1000 for figure in cpu_us(lambda: work, STEPS, rounds)]
