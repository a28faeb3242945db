"""The first token of one request, cold, and warm where another has had the same beginning; inside the engine."""

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from replica.device.sizes import Limits
from replica.engine.engine import Engine
from replica.messages import Output
from tests.gpu.engines import BLOCK, engine_of, finish, greedy, made, runner_of, submit, tokens
from tests.gpu.place import Place
from tests.gpu.report import Table
from tests.replica.shapes import LLAMA31_8B

TITLE = "first token of a Llama-3.1-8B with random weights, and 64 tokens of its own after a shared prefix"
PREFIXES, OWN = (512, 2048, 8192), 64
ROUNDS = 3
SOONER = 7.6  # target, at the longest prefix


class First(NamedTuple):
    seconds: float
    cached_tokens: int


def run(place: Place, table: Table) -> None:
    prefixes = place.size(PREFIXES, (32, 64))
    longest = max(prefixes) + OWN + BLOCK
    limits = Limits(longest, 1, longest)
    of = made(place, LLAMA31_8B, limits.tokens)
    table.note("seconds to make it", f"{of.seconds:.1f} s")
    runner = runner_of(of, of.caches_of(3 * longest // BLOCK), limits, graphs=not place.quick)
    engine = engine_of(runner, limits)
    chance = random.Random(0)
    for prefix in prefixes:
        ask_twice(engine, chance, prefix)  # compiles
        pairs = [ask_twice(engine, chance, prefix) for _ in range(ROUNDS)]
        tell(table, prefix, pairs, at_least=SOONER if prefix == PREFIXES[-1] else 0.0)


def ask_twice(engine: Engine, chance: random.Random, prefix: int) -> tuple[First, First]:
    """A new prefix, and the same with other tokens behind it."""
    engine.reset()
    vocabulary = engine.runner.vocab_size
    shared = tokens(chance, prefix, vocabulary)
    cold, warm = (first_token(engine, [*shared, *tokens(chance, OWN, vocabulary)]) for _ in range(2))
    if cold.cached_tokens or not prefix <= warm.cached_tokens < prefix + BLOCK:
        raise RuntimeError(f"of {prefix} tokens {cold.cached_tokens} were cached, and then {warm.cached_tokens}")
    return cold, warm


def first_token(engine: Engine, prompt: Sequence[int]) -> First:
    cached: list[int] = []

    def hear(output: Output) -> None:
        cached.append(output.cached_tokens)

    began_s = time.perf_counter()
    submit(engine, [greedy(prompt, 1)])
    finish(engine, hear)
    return First(time.perf_counter() - began_s, cached[0])


def tell(table: Table, prefix: int, pairs: list[tuple[First, First]], at_least: float) -> None:
    table.figure(f"{prefix:,} + {OWN} tokens, cold", [cold.seconds * 1000 for cold, _ in pairs], "ms")
    table.figure(f"{prefix:,} of {prefix + OWN:,} cached", [warm.seconds * 1000 for _, warm in pairs], "ms")
    sooner = [cold.seconds / warm.seconds for cold, warm in pairs]
    table.figure(f"{prefix:,} cached: sooner than cold", sooner, "times", least=at_least)
