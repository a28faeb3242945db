"""Measure a real model on one thread: first tokens, cold and warm, and decoding speed beside transformers.

The model has the shape of Qwen3-0.6B and random weights. Ours and transformers' decode in turns in processes of
their own, with random KV instead of a computed context, which costs the same to read. `--small` takes a smaller shape.
"""

import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from events.blocks import pack_tokens
from kernels.contexts import Context
from kernels.cpu import exact, fused
from kernels.paged import LayerCache
from replica.build import build, build_on_cpu
from replica.config import EngineConfig
from replica.engine.engine import Engine
from replica.messages import Sampling, Submit
from replica.model.config import read_config
from replica.runners.clock import WallClock
from replica.runners.native import NativeRunner
from replica.runners.request import Scheduled
from replica.runners.runner import ImmediateRunner, SampledToken
from tests.bench.measure import heading, row
from tests.chaos.replicas import cpu_s
from tests.replica.natives import Native
from tests.replica.shapes import QWEN3_06B

QWEN3 = QWEN3_06B | {
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": None,
}
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
}
DTYPES = ("float32", "bfloat16")
PROMPT, NEW, WARM_UP = 2048, 16, 128  # tokens
BATCHES, CONTEXTS = (1, 8, 16), (64, 512)
STEPS = 16  # of decoding, in one measurement
COLD_ROUNDS = 3  # at most
PATIENCE_S = 600.0  # for a slow machine to load the model, and to compute a prompt
SOONER, FASTER = 7.6, 1.0  # targets


class Cost(NamedTuple):
    elapsed_s: float
    cpu_s: float


def run(rounds: int, *, small: bool = False) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), QWEN3 | (SMALL if small else {}))
        config = read_config(Path(folder))
        print(f"Qwen3 with {config.parameters / 1e6:.0f} M random weights, {config.num_layers} layers\n")
        for dtype in DTYPES:
            first_tokens(Path(folder), dtype, rounds)
        for dtype in DTYPES:
            decoding(Path(folder), dtype, rounds)
    promise(config.num_heads, config.num_kv_heads, config.head_dim, rounds)


# ---- the model


def make_model(folder: Path, config: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    save_file({name: weight(shape, generator) for name, shape in shapes(config)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def weight(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    yield "model.norm.weight", (width,)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (
            ("input_layernorm", (width,)),
            ("post_attention_layernorm", (width,)),
            *[(f"self_attn.{part}_norm", (head,)) for part in "qk" if config["model_type"] == "qwen3"],
            ("self_attn.q_proj", (queries, width)),
            ("self_attn.k_proj", (keys, width)),
            ("self_attn.v_proj", (keys, width)),
            ("self_attn.o_proj", (width, queries)),
            ("mlp.gate_proj", (inner, width)),
            ("mlp.up_proj", (inner, width)),
            ("mlp.down_proj", (width, inner)),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape


def tokens(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chance.randrange(vocabulary) for _ in range(count)]


def engine_config(folder: Path, dtype: str, num_blocks: int) -> EngineConfig:
    return EngineConfig(
        model="bench",
        model_path=str(folder),
        dtype=dtype,  # type: ignore[arg-type]
        num_blocks=num_blocks,
        max_num_batched_tokens=PROMPT + NEW,
        max_model_len=PROMPT + 2 * NEW,
        events=None,
    )


# ---- the first token


def first_tokens(folder: Path, dtype: str, rounds: int) -> None:
    """The same prompts, in the engine's own process and through HTTP."""
    rounds = min(rounds, COLD_ROUNDS)
    blocks = 2 * (PROMPT + 2 * NEW) // 16
    with worker("first", folder, dtype, blocks) as ask:
        ask({"seed": rounds, "tokens": WARM_UP})
        costs = [ask({"seed": seed, "tokens": PROMPT}) for seed in range(rounds)]
    tell_first_tokens(f"{dtype}, the engine alone", costs)
    options = ("--dtype", dtype, "--num-blocks", blocks, "--max-num-batched-tokens", PROMPT + NEW)
    with serving(folder, *options, "--served-model-name", "bench") as served:
        vocabulary = read_config(folder).vocab_size
        over_http(served, three_prompts(random.Random(1), WARM_UP, vocabulary))
        costs = [over_http(served, three_prompts(random.Random(0), PROMPT, vocabulary))]
    tell_first_tokens(f"{dtype}, over HTTP", costs)


def tell_first_tokens(name: str, costs: list[list[Cost]]) -> None:
    heading(f"first token after {PROMPT:,} tokens: {name}")
    kinds = ("cold", "the same prompt again", f"the same prompt and {NEW} tokens more")
    for kind, of_kind in zip(kinds, zip(*costs, strict=True), strict=True):
        row(f"{kind}: elapsed", [cost.elapsed_s * 1000 for cost in of_kind], "ms")
        row(f"{kind}: CPU", [cost.cpu_s * 1000 for cost in of_kind], "ms")
    for place, kind in enumerate(kinds[1:], start=1):
        sooner = [of_round[0].elapsed_s / of_round[place].elapsed_s for of_round in costs]
        row(f"{kind}: sooner than cold", sooner, "times", f">= {SOONER}" if place == 1 else "")
    print()


def three_prompts(chance: random.Random, length: int, vocabulary: int) -> list[list[int]]:
    prompt = tokens(chance, length, vocabulary)
    return [prompt, prompt, prompt + tokens(chance, NEW, vocabulary)]


@contextmanager
def serving(folder: Path, *options: object, **environment: str) -> Iterator[Native]:
    running = Native(folder, *options, **environment)
    try:
        running.ready_line = running.out.get(timeout=PATIENCE_S)
        yield running
    finally:
        running.process.kill()
        running.end(None)


def over_http(served: Native, prompts: list[list[int]]) -> list[Cost]:
    return [http_cost(served, prompt) for prompt in prompts]


def http_cost(served: Native, prompt: list[int]) -> Cost:
    """Cost of a request for one token; the answer's end is the first token."""
    pids = served.process.pid, served.engine_pid
    began_s, before_s = time.perf_counter(), sum(map(cpu_s, pids))
    connection = HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    asked = {"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(asked))
    answer = connection.getresponse()
    answer.read()
    cost = Cost(time.perf_counter() - began_s, sum(map(cpu_s, pids)) - before_s)
    connection.close()
    assert answer.status == 200, answer.reason
    return cost


# ---- decoding


def decoding(folder: Path, dtype: str, rounds: int) -> None:
    longest = max(CONTEXTS) + STEPS + 16
    blocks = max(BATCHES) * longest // 16
    with worker("ours", folder, dtype, blocks) as ours, worker("theirs", folder, dtype, blocks) as theirs:
        for context in CONTEXTS:
            heading(f"decoding: {dtype}, {context} tokens of context")
            for batch in BATCHES:
                asked = {"batch": batch, "context": context}
                pairs = [(ours(asked)[0], theirs(asked)[0]) for _ in range(rounds + 1)][1:]
                tell_decoding(batch, pairs)
            print()


def tell_decoding(batch: int, pairs: list[tuple[Cost, Cost]]) -> None:
    made = batch * STEPS
    row(f"batch {batch}: ours", [made / ours.elapsed_s for ours, _ in pairs], "tok/s")
    row(f"batch {batch}: transformers'", [made / theirs.elapsed_s for _, theirs in pairs], "tok/s")
    target = f">= {FASTER:g}" if batch == 8 else ""
    row(f"batch {batch}: ratio, elapsed", [theirs.elapsed_s / ours.elapsed_s for ours, theirs in pairs], "", target)
    row(f"batch {batch}: ratio, CPU", [theirs.cpu_s / ours.cpu_s for ours, theirs in pairs], "", target)


# ---- processes of their own

Ask = Callable[[dict[str, int]], list[Cost]]


@contextmanager
def worker(kind: str, folder: Path, dtype: str, blocks: int, module: str = "tests.bench.native") -> Iterator[Ask]:
    """Answers a line of JSON with a line of JSON."""
    command = [sys.executable, "-m", module, kind, str(folder), dtype, str(blocks)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        written, read = process.stdin, process.stdout

        def ask(asked: dict[str, int]) -> list[Cost]:
            written.write(json.dumps(asked) + "\n")
            written.flush()
            return [Cost(*cost) for cost in json.loads(read.readline())]

        yield ask
        written.close()


class Worker(ABC):
    def __init__(self, folder: Path, dtype: str, blocks: int) -> None:
        self.folder = folder
        self.dtype = dtype
        self.blocks = blocks
        self.config = read_config(folder)

    @abstractmethod
    def answer(self, asked: dict[str, int]) -> list[Cost]: ...

    def clock(self) -> Cost:
        return Cost(time.perf_counter(), time.process_time())


def between(began: Cost, ended: Cost) -> Cost:
    return Cost(ended.elapsed_s - began.elapsed_s, ended.cpu_s - began.cpu_s)


class First(Worker):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        config = engine_config(self.folder, self.dtype, self.blocks)
        self.engine = Engine(config, build(config), WallClock())

    def answer(self, asked: dict[str, int]) -> list[Cost]:
        prompts = three_prompts(random.Random(asked["seed"]), asked["tokens"], self.config.vocab_size)
        return [self.first_token(prompt) for prompt in prompts]

    def first_token(self, prompt: list[int]) -> Cost:
        gc.collect()
        began = self.clock()
        self.engine.submit(Submit(1, pack_tokens(prompt), Sampling(max_tokens=1, temperature=0.0)))
        while self.engine.busy:
            self.engine.step()
        return between(began, self.clock())


class Ours(Worker):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        config = engine_config(self.folder, self.dtype, self.blocks)
        self.runner = PromptsForFree(build_on_cpu(config))
        self.engine = Engine(config, self.runner, WallClock())

    def answer(self, asked: dict[str, int]) -> list[Cost]:
        gc.collect()
        chance = random.Random(1)
        for number in range(asked["batch"]):
            prompt = pack_tokens(tokens(chance, asked["context"], self.config.vocab_size))
            self.engine.submit(Submit(number, prompt, Sampling(max_tokens=STEPS + 1, temperature=0.0, ignore_eos=True)))
        while any(request.generated == 0 for request in self.engine.scheduler.requests.values()):
            self.engine.step()
        began, steps = self.clock(), self.engine.steps
        while self.engine.busy:
            self.engine.step()
        assert self.engine.steps - steps == STEPS
        self.engine.reset()
        return [between(began, self.clock())]


class PromptsForFree(ImmediateRunner):
    """Takes a prompt for computed, with the random KV that is in its blocks."""

    memory = None

    def __init__(self, runner: NativeRunner) -> None:
        self.runner = runner
        self.num_blocks = runner.num_blocks
        self.vocab_size = runner.vocab_size
        self.attention_name = runner.attention_name
        for cache in runner.caches:
            cache.keys.normal_()
            cache.values.normal_()

    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        if any(scheduled.tokens > 1 for scheduled in batch):
            return [SampledToken(1) if scheduled.samples else None for scheduled in batch]
        return self.runner.run(batch)


def theirs(folder: Path, dtype: str) -> Any:
    """transformers' model, on one thread."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()


class Theirs(Worker):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.model = theirs(self.folder, self.dtype)

    def answer(self, asked: dict[str, int]) -> list[Cost]:
        gc.collect()
        batch, context = asked["batch"], asked["context"]
        prompts = torch.randint(self.config.vocab_size, (batch, context))
        times: list[Cost] = []

        def note(*_: object, **__: object) -> Tensor:
            times.append(self.clock())
            return torch.zeros(batch, dtype=torch.bool)

        self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            past_key_values=self.random_cache(batch, context - 1),
            max_new_tokens=STEPS + 1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[note],
        )
        assert len(times) == STEPS + 1
        return [between(times[0], times[-1])]

    def random_cache(self, batch: int, count: int) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        shape = (batch, self.config.num_kv_heads, count, self.config.head_dim)
        for layer in range(self.config.num_layers):
            keys, values = torch.randn(2, *shape, dtype=getattr(torch, self.dtype))
            cache.update(keys, values, layer)
        return cache


WORKERS: dict[str, type[Worker]] = {"first": First, "ours": Ours, "theirs": Theirs}


def work(workers: dict[str, type[Worker]], kind: str, folder: str, dtype: str, blocks: str) -> None:
    worker = workers[kind](Path(folder), dtype, int(blocks))
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)


# ---- the cost of equal bits


class Shape(NamedTuple):
    start: int
    rows: int


def promise(heads: int, kv_heads: int, head_dim: int, rounds: int) -> None:
    heading("attention of one layer in float32: batch-invariant (`exact`) and torch's own; CPU")
    for name, shape in (
        ("prefill of 512 tokens", Shape(0, 512)),
        ("prefill of 2,048 tokens", Shape(0, 2048)),
        ("prefill of 64 tokens after 1,984", Shape(1984, 64)),
        ("a token after 63", Shape(63, 1)),
        ("a token after 511", Shape(511, 1)),
        ("a token after 2,047", Shape(2047, 1)),
    ):
        compare(name, shape, heads, kv_heads, head_dim, rounds)
    print()


@torch.inference_mode()
def compare(name: str, shape: Shape, heads: int, kv_heads: int, head_dim: int, rounds: int) -> None:
    length = shape.start + shape.rows
    blocks = torch.randperm(length // 16 + 1)
    slots = (blocks[:, None] * 16 + torch.arange(16)).flatten()[:length]
    keys, values = torch.randn(2, len(blocks), 16, kv_heads, head_dim)
    queries = torch.randn(shape.rows, heads, head_dim)
    arguments = queries, LayerCache(keys, values), Context(slots, *shape)
    repeats = max(1, 2_000_000 // (length * shape.rows + 20_000))
    costs = [(milliseconds(exact, arguments, repeats), milliseconds(fused, arguments, repeats)) for _ in range(rounds)]
    row(f"{name}: exact", [mine for mine, _ in costs], "ms")
    row(f"{name}: torch's", [theirs for _, theirs in costs], "ms")
    row(f"{name}: exact / torch's", [mine / theirs for mine, theirs in costs], "")


def milliseconds(attend: Callable[..., Tensor], arguments: tuple[Any, ...], repeats: int) -> float:
    attend(*arguments)
    began_s = time.process_time()
    for _ in range(repeats):
        attend(*arguments)
    return (time.process_time() - began_s) * 1000 / repeats


if __name__ == "__main__":
    work(WORKERS, *sys.argv[1:])
