"""Measure SmolLM2-135M on one thread at three lengths of the prompt: prefill and decoding, beside transformers.

Ours and transformers' answer the same prompts in turns, in processes of their own. Weights are random, which costs the
same. Ours has no limit of a step's time, since that depends on what else the machine does.
"""

import gc
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from events.blocks import pack_tokens
from replica.build import build_on_cpu
from replica.config import EngineConfig
from replica.engine.engine import Engine
from replica.messages import Sampling, Submit
from replica.runners.clock import WallClock
from tests.bench.measure import heading, row
from tests.bench.native import Cost, Worker, between, make_model, theirs, tokens, work, worker
from tests.replica.shapes import SMOLLM2_135M

LENGTHS = (54, 954, 4615)
STEPS = 16
BLOCKS = 2 * (max(LENGTHS) + STEPS) // 16
DTYPE = "bfloat16"
PREFILL, DECODE, LONG_DECODE = 1.1, 2.0, 4.0  # targets: times transformers' speed


def run(rounds: int, *, small: bool = False) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        folder = Path(name)
        make_model(folder, SMOLLM2_135M | ({"num_hidden_layers": 2} if small else {}))
        own, others = (
            started.enter_context(worker(kind, folder, DTYPE, BLOCKS, "tests.bench.lengths")) for kind in WORKERS
        )
        for ask in (own, others):
            ask({"length": min(LENGTHS), "seed": rounds})
        for length in LENGTHS:
            asked = [{"length": length, "seed": seed} for seed in range(rounds)]
            tell(length, [(own(one), others(one)) for one in asked])


def tell(length: int, pairs: list[tuple[list[Cost], list[Cost]]]) -> None:
    heading(f"{DTYPE}, a prompt of {length:,} tokens")
    decode_target = LONG_DECODE if length == max(LENGTHS) else DECODE
    for place, (part, made, target) in enumerate((("prefill", length, PREFILL), ("decoding", STEPS, decode_target))):
        costs = [(ours[place], theirs[place]) for ours, theirs in pairs]
        row(f"{part}: ours", [made / ours.cpu_s for ours, _ in costs], "tok/s of CPU")
        row(f"{part}: transformers'", [made / theirs.cpu_s for _, theirs in costs], "tok/s of CPU")
        row(f"{part}: ratio, elapsed", [theirs.elapsed_s / ours.elapsed_s for ours, theirs in costs], "")
        row(f"{part}: ratio, CPU", [theirs.cpu_s / ours.cpu_s for ours, theirs in costs], "", f">= {target:g}")
    print()


class Ours(Worker):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch.set_num_threads(1)
        config = EngineConfig(
            model="bench",
            model_path=str(self.folder),
            dtype=self.dtype,  # type: ignore[arg-type]
            num_blocks=self.blocks,
            max_model_len=max(LENGTHS) + STEPS + 1,
            events=None,
        )
        self.engine = Engine(config, build_on_cpu(config), WallClock())

    def answer(self, asked: dict[str, int]) -> list[Cost]:
        gc.collect()
        prompt = tokens(random.Random(asked["seed"]), asked["length"], self.config.vocab_size)
        self.engine.reset()
        times = [self.clock()]
        sampling = Sampling(max_tokens=STEPS + 1, temperature=0.0, ignore_eos=True)
        self.engine.submit(Submit(1, pack_tokens(prompt), sampling))
        while any(not request.generated for request in self.engine.scheduler.requests.values()):
            self.engine.step()
        times.append(self.clock())
        while self.engine.busy:
            self.engine.step()
        times.append(self.clock())
        return [between(*times[:2]), between(*times[1:])]


class Theirs(Worker):
    """With the cache that grows and with the one of fixed size; what takes less counts."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.model = theirs(self.folder, self.dtype)

    def answer(self, asked: dict[str, int]) -> list[Cost]:
        prompt = torch.tensor([tokens(random.Random(asked["seed"]), asked["length"], self.config.vocab_size)])
        both = zip(*(self.costs(prompt, cache) for cache in ("dynamic", "static")), strict=True)
        return [min(costs, key=lambda cost: cost.cpu_s) for costs in both]

    def costs(self, prompt: Tensor, cache: str) -> list[Cost]:
        gc.collect()
        times = [self.clock()]

        def note(*_: object, **__: object) -> Tensor:
            times.append(self.clock())
            return torch.zeros(1, dtype=torch.bool)

        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache_implementation=cache,
            min_new_tokens=STEPS + 1,
            max_new_tokens=STEPS + 1,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[note],
        )
        return [between(times[0], times[1]), between(times[1], times[-1])]


WORKERS: dict[str, type[Worker]] = {"ours": Ours, "theirs": Theirs}

if __name__ == "__main__":
    work(WORKERS, *sys.argv[1:])
