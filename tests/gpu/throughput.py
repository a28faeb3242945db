"""nano-vllm's benchmark, with its seed and its lengths: tokens a second, and what caching costs where it is of no use.

The weights are random, which costs the same.
"""

import random
import time
from collections.abc import Sequence

from replica.device.runner import DeviceRunner
from replica.device.sizes import Limits
from replica.engine.engine import Engine
from replica.messages import Output, Sampling
from tests.gpu.engines import BLOCK, Asked, engine_of, finish, made, runner_of, submit
from tests.gpu.place import Place
from tests.gpu.report import Table
from tests.replica.shapes import QWEN3_06B

TITLE = "256 requests to a Qwen3-0.6B with random weights, 100 to 1,024 tokens in and out"
REQUESTS, VOCABULARY = 256, 10_000
SHORTEST, LONGEST = 100, 1024
ROWS, MODEL_LENGTH = 16_384, 4096
LEAST, MAX_OVERHEAD = 15_000, 1.0  # tokens/s, %
ROUNDS = 3  # with caching and without, in turns; fewer where time runs out


def requests(count: int, longest: int, temperature: float = 0.6, vocabulary: int = VOCABULARY) -> list[Asked]:
    """Drawn in the order in which nano-vllm draws them: the prompts first."""
    chance = random.Random(0)
    shortest = min(SHORTEST, longest // 4)
    prompts = [[chance.randint(0, vocabulary) for _ in range(chance.randint(shortest, longest))] for _ in range(count)]
    return [
        Asked(
            prompt,
            Sampling(
                max_tokens=chance.randint(shortest, longest), temperature=temperature, ignore_eos=True, seed=number
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def run(place: Place, table: Table) -> None:
    count, longest = place.size((REQUESTS, LONGEST), (4, 24))
    limits = Limits(*place.size((ROWS, count, MODEL_LENGTH), (128, count, 256)))
    of = made(place, QWEN3_06B, limits.tokens)
    vocabulary = place.size(VOCABULARY, of.model.config.vocab_size - 1)
    asked = requests(count, longest, vocabulary=vocabulary)
    blocks = sum(-(-(len(one.prompt) + one.sampling.max_tokens) // BLOCK) + 1 for one in asked)
    runner = runner_of(of, of.caches_of(min(blocks, of.blocks_that_fit())), limits)
    rates = compared(place, runner, limits, asked)
    greedy = requests(count, longest, 0.0, vocabulary)
    rates["greedy"] = [rate_of(engine_of(runner, limits), greedy)]
    tell(table, rates, asked)


def compared(place: Place, runner: DeviceRunner, limits: Limits, asked: Sequence[Asked]) -> dict[str, list[float]]:
    """Output tokens a second, on one runner: only the engine before it differs."""
    engines = {
        "cached": engine_of(runner, limits),
        "uncached": engine_of(runner, limits, enable_prefix_caching=False, enable_partial_reuse=False),
    }
    for engine in engines.values():  # compiles, and what is computed once
        rate_of(engine, [one._replace(sampling=Sampling(max_tokens=4)) for one in asked])
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):
        began_s = time.monotonic()
        for name, engine in engines.items():
            rates[name].append(rate_of(engine, asked))
        if place.left_s < 2 * (time.monotonic() - began_s):
            break
    return rates


def rate_of(engine: Engine, asked: Sequence[Asked]) -> float:
    """With an empty cache at the start, and nothing to find in it."""
    if not engine.reset():
        raise RuntimeError("the cache cannot be emptied")
    hits, counted = engine.stats().pool.hit_tokens, 0

    def hear(output: Output) -> None:
        nonlocal counted
        counted += len(output.token_ids)

    began_s = time.perf_counter()
    submit(engine, asked)
    finish(engine, hear)
    elapsed_s = time.perf_counter() - began_s
    expected, hits = sum(one.sampling.max_tokens for one in asked), engine.stats().pool.hit_tokens - hits
    if counted != expected or (hits and not engine.scheduler.preemptions):
        raise RuntimeError(f"{counted} tokens came of {expected}, and {hits} were found in the cache")
    return counted / elapsed_s


def tell(table: Table, rates: dict[str, list[float]], asked: Sequence[Asked]) -> None:
    made_tokens = sum(one.sampling.max_tokens for one in asked)
    read_tokens = sum(len(one.prompt) for one in asked)
    table.note("tokens in and out", f"{read_tokens:,} and {made_tokens:,}")
    table.figure("output, temperature 0.6", rates["cached"], "tok/s", least=LEAST)
    table.figure("all of it, temperature 0.6", [made_tokens / rate for rate in rates["cached"]], "s")
    table.figure("output, temperature 0.6, no prefix caching", rates["uncached"], "tok/s")
    table.figure("output, greedy", rates["greedy"], "tok/s")
    overhead = 100 * (max(rates["uncached"]) / max(rates["cached"]) - 1)
    table.figure("prefix caching costs, nothing to find, best of the rounds", [overhead], "%", most=MAX_OVERHEAD)
