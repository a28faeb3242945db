"""The first token of one request: cold, cached on the GPU, and from the host's memory; and what others notice."""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

from kernels.paged import LayerCache
from replica.device.build import new_caches
from replica.device.memory import DeviceMemory
from replica.device.sizes import Limits
from replica.engine.engine import Engine
from replica.messages import Output
from replica.model.sizing import GIGABYTE
from replica.runners.clock import WallClock
from replica.tiers.mover import HostMemory, Mover
from tests.gpu.engines import BLOCK, Made, config_of, finish, greedy, made, runner_of, submit, tokens
from tests.gpu.place import Place
from tests.gpu.report import Table
from tests.replica.shapes import LLAMA31_8B

TITLE = "first token of a Llama-3.1-8B with random weights: cold, cached, and from the host's memory"
PREFIXES, OWN = (512, 2048, 8192), 64
ROUNDS = 3
ANSWER = 16  # tokens that are compared
OTHERS, OTHERS_PROMPT, OTHERS_STEPS = 16, 256, 40
CACHED_SOONER, SOONER = 7.6, 4.0  # targets, at the longest prefix, than cold
POLL_S = 0.0005  # as an engine's loop waits where there are only loads


class First(NamedTuple):
    seconds: float
    cached_tokens: int
    token_ids: list[int]


class Loading(Engine):
    """Brings back whatever it can: what is checked here is not whether that pays off, as it may not on a busy CPU."""

    def _pays_off(self, medium: str) -> bool:  # noqa: ARG002
        return True


class Asker:
    """An engine whose cache holds about two of the longest prompts, with host memory for several behind it."""

    def __init__(self, place: Place, of: Made, longest: int) -> None:
        blocks = 5 * longest // (2 * BLOCK)
        limits = Limits(longest, 1 + OTHERS, longest)
        memory = new_caches(of.model, blocks + 1, BLOCK)
        runner = runner_of(of, [LayerCache(keys, values) for keys, values in memory], limits, graphs=not place.quick)
        device = DeviceMemory(memory, of.accelerator)
        self.host = HostMemory(8 * longest // BLOCK, device.block_bytes)
        began_s = time.monotonic()
        self.mover = Mover(device, self.host, blocks)
        self.pinned_s = time.monotonic() - began_s
        # Whole blocks only: steps over KV from the GPU and from the host then have the same size.
        config = config_of(runner, limits, host_blocks=self.host.num_slots, enable_partial_reuse=False)
        self.engine = Loading(config, runner, WallClock(), self.mover)
        self.chance = random.Random(0)
        self.vocabulary = runner.vocab_size

    def new(self, count: int) -> list[int]:
        return tokens(self.chance, count, self.vocabulary)

    def first(self, prompt: Sequence[int], max_tokens: int = 1) -> First:
        """Seconds until the first token."""
        outputs: list[Output] = []
        at_s: list[float] = []

        def hear(output: Output) -> None:
            outputs.append(output)
            at_s.append(time.perf_counter())

        began_s = time.perf_counter()
        submit(self.engine, [greedy(prompt, max_tokens)])
        while self.engine.busy:
            if self.engine.only_loads:
                time.sleep(POLL_S)
            for output in self.engine.step():
                hear(output)
        ids = [token for output in outputs for token in output.token_ids]
        return First(at_s[0] - began_s, outputs[0].cached_tokens, ids)


def run(place: Place, table: Table) -> None:
    prefixes = place.size(PREFIXES, (32, 64))
    longest = max(prefixes) + OWN + BLOCK
    of = made(place, LLAMA31_8B, longest)
    asker = Asker(place, of, longest)
    try:
        gigabytes = len(asker.host.whole) / GIGABYTE
        table.figure(f"pinning {gigabytes:.3g} GB of host memory", [asker.pinned_s], "s")
        for prefix in prefixes:
            came_back(table, asker, prefix, longest)
        moves(table, asker)
        beside(place, table, asker, max(prefixes), longest)
    finally:
        asker.mover.close()


def came_back(table: Table, asker: Asker, prefix: int, longest: int) -> None:
    cold, warm, back = list[First](), list[First](), list[First]()
    for number in range(1 + ROUNDS):  # the first compiles, and measures the speed of loads
        if not asker.engine.reset():
            raise RuntimeError("the cache cannot be emptied")
        shared = asker.new(prefix)
        asked = [[*shared, *asker.new(OWN)] for _ in range(2)]
        results = [asker.first(prompt) for prompt in asked]
        push_out(asker, longest)
        results.append(asker.first([*shared, *asker.new(OWN)]))
        found = [one.cached_tokens // BLOCK * BLOCK for one in results]
        if found != [0, prefix, prefix]:
            raise RuntimeError(f"of {prefix} tokens {found} were cached")
        if number:
            for kept, one in zip((cold, warm, back), results, strict=True):
                kept.append(one)
    what = f"{prefix:,} + {OWN} tokens"
    table.figure(f"{what}, cold", [one.seconds * 1000 for one in cold], "ms")
    table.figure(f"{what}, cached on the GPU", [one.seconds * 1000 for one in warm], "ms")
    table.figure(f"{what}, from host memory", [one.seconds * 1000 for one in back], "ms")
    for where, target, firsts in (("cached on the GPU", CACHED_SOONER, warm), ("from host memory", SOONER, back)):
        sooner = [one.seconds / other.seconds for one, other in zip(cold, firsts, strict=True)]
        least = target * (prefix == PREFIXES[-1])
        table.figure(f"{what}, {where}: sooner than cold", sooner, "times", least=least)
    compare(table, asker, what, asker.new(prefix + OWN), longest)


def compare(table: Table, asker: Asker, what: str, prompt: Sequence[int], longest: int) -> None:
    """Ask with all cached on the GPU, and then in the host's memory: steps are of the same size, and round alike."""
    asker.first(prompt)
    warm = asker.first(prompt, ANSWER)
    push_out(asker, longest)
    back = asker.first(prompt, ANSWER)
    same = warm.token_ids == back.token_ids and warm.cached_tokens == back.cached_tokens
    measured = f"{'the same' if same else 'another'}, {back.cached_tokens} tokens cached"
    table.check(f"{what}: the answer from host memory", same, measured, "as from the GPU")


def push_out(asker: Asker, longest: int) -> None:
    """Ask about other things until nothing is left of what was asked before."""
    for _ in range(3):
        asker.first(asker.new(longest - BLOCK))


def moves(table: Table, asker: Asker) -> None:
    """Blocks alone, with nothing beside them; then in both directions at once."""
    memory, host = asker.mover._memory, asker.host
    count = min(256, host.num_slots // 2, asker.engine.pool.free // 2)
    parts = [range(count), range(count, 2 * count)]
    (saved, loaded), (kept, given) = parts, [[host[slot] for slot in part] for part in parts]

    def save() -> None:
        memory.read(saved, kept)

    def load() -> None:
        memory.write(loaded, given)

    def both() -> None:
        with ThreadPoolExecutor(2) as threads:
            for move in [threads.submit(save), threads.submit(load)]:
                move.result()

    each = ("saved to", "GB/s", save), ("loaded from", "GB/s", load)
    for name, unit, move in (*each, ("saved to, and as many loaded from,", "GB/s each way", both)):
        rates = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            move()
            rates.append(count * memory.block_bytes / (time.perf_counter() - began_s) / 1e9)
        table.figure(f"{count} blocks of {memory.block_bytes / 1e6:.3g} MB {name} host memory", rates, unit)


def beside(place: Place, table: Table, asker: Asker, prefix: int, longest: int) -> None:
    """The steps of others that decode, with loads and without."""
    engine = asker.engine
    engine.reset()
    own_steps = place.size(OTHERS_STEPS, 4)
    rounds = place.size(ROUNDS, 1)
    shared = [asker.new(prefix) for _ in range(rounds)]
    for one in shared:
        asker.first([*one, *asker.new(OWN)])
    push_out(asker, longest)
    count = place.size(OTHERS, 2)
    room = (3 * rounds + 1) * own_steps
    submit(engine, [greedy(asker.new(place.size(OTHERS_PROMPT, 8)), room) for _ in range(count)], first=1)
    for _ in range(own_steps):
        engine.step()
    alone, loading = list[float](), list[float]()
    for one in shared:
        alone += [timed(engine) for _ in range(own_steps)]
        submit(engine, [greedy([*one, *asker.new(OWN)], 1)])
        engine.step()
        while engine.scheduler.transfers.tokens():
            loading.append(timed(engine))
        for _ in range(3):  # its own prompt, and its end
            engine.step()
    finish(engine, lambda _: None)
    if not loading:
        raise RuntimeError("nothing was loaded beside others")
    table.figure(f"a step of {count} others", [median(alone) * 1000], "ms")
    table.figure("the same while blocks are loaded", [median(loading) * 1000], "ms", f"{len(loading)} steps")
    table.figure("slower by", [100 * (median(loading) / median(alone) - 1)], "%")


def timed(engine: Engine) -> float:
    began_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - began_s
