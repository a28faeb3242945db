"""Measure the engine core's CPU and memory: naming, look-up, allocation, a whole step."""

import json
import random
import subprocess
import sys
from collections.abc import Callable

from events.blocks import extend_keys, pack_tokens
from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.config import EngineConfig, SimulatedConfig
from replica.engine.engine import Engine
from replica.messages import Sampling, Submit
from replica.runners.clock import VirtualClock
from replica.runners.runner import SampledToken
from replica.runners.simulated import SimulatedRunner
from tests.bench.measure import cpu_us, heading, resident_bytes, row

BLOCK = 16
PROMPT_BLOCKS = 256
POOL_BLOCKS = 26_702  # an 8B model on an 80 GB GPU
PREFILL_TOKENS_PER_S = 8000.0


def run(rounds: int) -> None:
    chance = random.Random(1)
    heading("engine core, 16-token blocks, prompts of 256 blocks, a pool of 26,702; CPU per block")
    hashing(chance, rounds)
    hitting(chance, rounds)
    turning_over(chance, rounds)
    print()
    heading("a prompt of 4,096 tokens without hits, in a full cache; CPU per prompt")
    missing(chance, rounds)
    print()
    heading("scheduling and committing one decoding step (no runner); CPU per step")
    for batch in (32, 128, 256):
        stepping(batch, rounds)
    print()
    heading("resident memory of the pool per cached block, everything included")
    for name, turnovers in (("filled once", 0), ("after its content was replaced 3 times", 3)):
        command = [sys.executable, "-c", f"from tests.bench.core import memory; memory({turnovers})"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        row(name, [json.loads(result.stdout)], "B", "<= 230; vLLM 257")


def prompt(chance: random.Random, blocks: int = PROMPT_BLOCKS) -> Chain:
    return Chain([chance.randrange(150_000) for _ in range(blocks * BLOCK + 1)], BLOCK, "m")


def serve(pool: BlockPool, chain: Chain) -> None:
    """Take one request through the pool, from look-up to release."""
    match = pool.match(chain)
    blocks = pool.take(match.blocks, -(-len(chain) // BLOCK) - len(match.blocks))
    assert blocks is not None
    chain.named, chain.identity = len(match.blocks), match.identity
    pool.store(chain, blocks, len(chain.keys))
    pool.release(blocks)


def filled(chance: random.Random, *, events: bool = False, host: bool = False) -> BlockPool:
    slots = POOL_BLOCKS if host else 0
    pool = BlockPool(POOL_BLOCKS, BLOCK, events=events, host_slots=slots)
    for _ in range((POOL_BLOCKS + slots) // PROMPT_BLOCKS + 1):
        serve(pool, prompt(chance))
        settle(pool)
    return pool


def settle(pool: BlockPool) -> None:
    """Take the pool's events, and end the saves that it asks for as if all blocks had been copied."""
    pool.take_events()
    if pool.lower is not None:
        pool.lower.saved(pool.lower.take_saves())


def hashing(chance: random.Random, rounds: int) -> None:
    packed = pack_tokens([chance.randrange(150_000) for _ in range(PROMPT_BLOCKS * BLOCK)])
    repeats = 100
    work = lambda: lambda: [extend_keys(1, packed, BLOCK) for _ in range(repeats)]  # noqa: E731
    report("hash", cpu_us(work, PROMPT_BLOCKS * repeats, rounds), "<= 200; vLLM 1340-1947")


def hitting(chance: random.Random, rounds: int) -> None:
    pool = BlockPool(POOL_BLOCKS, BLOCK, events=False)
    chains = [prompt(chance) for _ in range(50)]
    for chain in chains:
        serve(pool, chain)

    def work() -> None:
        for chain in chains:
            assert len(pool.match(chain).blocks) == PROMPT_BLOCKS

    report("look up, all hit and verified", cpu_us(lambda: work, PROMPT_BLOCKS * 50, rounds), "<= 150; vLLM 607-620")


def turning_over(chance: random.Random, rounds: int) -> None:
    for events, host, target in (
        (False, False, "<= 500; vLLM 1700-2000"),
        (True, False, "<= 900; vLLM 4800-6000"),
        (False, True, ""),
        (True, True, ""),
    ):
        pool = filled(chance, events=events, host=host)

        def prepared(pool: BlockPool = pool) -> Callable[[], object]:
            chains = [prompt(chance) for _ in range(50)]

            def work() -> None:
                for chain in chains:
                    serve(pool, chain)
                    settle(pool)

            return work

        name = "look up, allocate, name, free: all new and evicting"
        name += (", with events" if events else "") + (", to the host's memory" if host else "")
        report(name, cpu_us(prepared, PROMPT_BLOCKS * 50, rounds), target)


def missing(chance: random.Random, rounds: int) -> None:
    """Measure all of prefix caching's work for a new prompt: naming, the look-up, registering, evicting."""
    pool = filled(chance)
    tiered = filled(chance, host=True)
    plain = BlockPool(POOL_BLOCKS, BLOCK, caching=False)
    token_lists = [[chance.randrange(150_000) for _ in range(PROMPT_BLOCKS * BLOCK + 1)] for _ in range(20)]

    def with_pool(pool: BlockPool) -> Callable[[], Callable[[], object]]:
        def prepared() -> Callable[[], object]:
            for tokens in token_lists:
                tokens[0] = chance.randrange(150_000)

            def work() -> None:
                for tokens in token_lists:
                    serve(pool, Chain(tokens, BLOCK, "m"))
                    settle(pool)

            return work

        return prepared

    cached = cpu_us(with_pool(pool), len(token_lists), rounds)
    kept = cpu_us(with_pool(tiered), len(token_lists), rounds)
    without = cpu_us(with_pool(plain), len(token_lists), rounds)
    row("with prefix caching", cached, "us")
    row("with the host's memory, too", kept, "us")
    row("without", without, "us")
    prefill_us = PROMPT_BLOCKS * BLOCK / PREFILL_TOKENS_PER_S * 1e6
    for name, figures, target in (("caching", cached, "< 0.1"), ("caching and the host's memory", kept, "< 2")):
        shares = [(one - other) / prefill_us * 100 for one, other in zip(figures, without, strict=True)]
        row(f"{name}, in % of the prefill at {PREFILL_TOKENS_PER_S:,.0f} tokens/s", shares, "%", target)


def stepping(batch: int, rounds: int) -> None:
    config = EngineConfig(model="m", engine="simulated", num_blocks=POOL_BLOCKS, max_num_batched_tokens=8192)
    clock = VirtualClock()
    engine = Engine(config, SimulatedRunner(SimulatedConfig(), clock, (0, 256)), clock)
    chance = random.Random(batch)
    for number in range(batch):
        tokens = pack_tokens([chance.randrange(150_000) for _ in range(100)])
        engine.submit(Submit(number, tokens, Sampling(max_tokens=8000, ignore_eos=True)))
    while any(request.remaining > 1 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    steps = 64

    def work() -> None:
        scheduler = engine.scheduler
        for _ in range(steps):
            scheduled = scheduler.schedule()
            scheduler.commit(scheduled, drawn)
            engine.take_events()

    drawn = [SampledToken(1)] * batch
    row(f"{batch} requests decoding", cpu_us(lambda: work, steps, rounds), "us")


def memory(turnovers: int) -> None:
    """Prints the bytes per block; runs in a process of its own."""
    chance = random.Random(3)
    serve(BlockPool(1000, BLOCK, events=False), prompt(chance))  # after one-time imports and allocations
    before = resident_bytes()
    pool = filled(chance)
    for _ in range(turnovers * POOL_BLOCKS // PROMPT_BLOCKS):
        serve(pool, prompt(chance))
    print((resident_bytes() - before) / pool.named)


def report(name: str, figures_us: list[float], target: str) -> None:
    row(name, [figure * 1000 for figure in figures_us], "ns", target)
