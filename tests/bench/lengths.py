"""Measure SmolLM2-135M on one thread at three lengths of the prompt: prefill and decoding, beside transformers.

Ours and transformers' answer the same prompts in turns, in processes of their own. Weights are random, which costs the
same. llama.cpp joins them where `llama_cpp` can be imported, with the 4-bit weights of `warmroute fetch smollm2`.
"""

import gc
import random
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from events.blocks import pack_tokens
from replica.clock import WallClock
from replica.config import EngineConfig
from replica.engine import Engine
from replica.messages import Sampling, Submit
from replica.model.locate import locate
from replica.native import build_on_cpu
from replica.settings import NATIVE_MAX_STEP_S
from tests.bench.measure import heading, row
from tests.bench.native import Cost, Worker, between, make_model, theirs, tokens, work, worker
from tests.replica.shapes import SMOLLM2_135M

LENGTHS = (54, 954, 4615)
STEPS = 16
BLOCKS = 2 * (max(LENGTHS) + STEPS) // 16
DTYPES = ("bfloat16",)
OURS, THEIRS, LLAMA_CPP = "ours", "transformers", "llama.cpp"
PREFILL, DECODE, LONG_DECODE = 1.1, 2.0, 4.0  # targets: times transformers' speed


def run(rounds: int, *, small: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), SMOLLM2_135M | ({"num_hidden_layers": 2} if small else {}))
        kinds = [kind for kind in WORKERS if kind != LLAMA_CPP or find_spec("llama_cpp")]
        for dtype in DTYPES:
            with ExitStack() as started:
                asks = {
                    kind: started.enter_context(worker(kind, Path(folder), dtype, BLOCKS, "tests.bench.lengths"))
                    for kind in kinds
                }
                for length in LENGTHS:
                    asked = [{"length": length, "seed": seed} for seed in range(rounds + 1)]
                    costs = [{kind: ask(one) for kind, ask in asks.items()} for one in asked][1:]
                    tell(f"{dtype}, a prompt of {length:,} tokens", length, costs)


def tell(name: str, length: int, costs: list[dict[str, list[Cost]]]) -> None:
    heading(name)
    decode_target = LONG_DECODE if length == max(LENGTHS) else DECODE
    for place, (part, made, target) in enumerate((("prefill", length, PREFILL), ("decoding", STEPS, decode_target))):
        for kind in costs[0]:
            row(f"{part}: {kind}", [made / cost[kind][place].elapsed_s for cost in costs], "tok/s")
        for kind in [kind for kind in costs[0] if kind != OURS]:
            ours = [(cost[OURS][place], cost[kind][place]) for cost in costs]
            aimed = f">= {target:g}" if kind == THEIRS else ""
            row(f"{part}: ours / {kind}, elapsed", [other.elapsed_s / own.elapsed_s for own, other in ours], "", aimed)
            row(f"{part}: ours / {kind}, CPU", [other.cpu_s / own.cpu_s for own, other in ours], "", aimed)
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
            max_step_s=NATIVE_MAX_STEP_S,
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


class LlamaCpp(Worker):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        from llama_cpp import Llama

        file = str(locate("smollm2") / "model.gguf")
        self.model = Llama(file, n_ctx=max(LENGTHS) + STEPS + 1, n_threads=1, n_threads_batch=1, verbose=False)

    def answer(self, asked: dict[str, int]) -> list[Cost]:
        self.model.reset()
        times = [self.clock()]
        self.model.eval(tokens(random.Random(asked["seed"]), asked["length"], self.config.vocab_size))
        token = self.model.sample(temp=0.0)
        times.append(self.clock())
        for _ in range(STEPS):
            self.model.eval([token])
            token = self.model.sample(temp=0.0)
        times.append(self.clock())
        return [between(*times[:2]), between(*times[1:])]


WORKERS: dict[str, type[Worker]] = {OURS: Ours, THEIRS: Theirs, LLAMA_CPP: LlamaCpp}

if __name__ == "__main__":
    work(WORKERS, *sys.argv[1:])
