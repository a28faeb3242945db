"""Measure a step's time on the host and on the device, for decoding alone and for a new prompt; and the start."""

import random
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from replica.device.accelerator import Accelerator, Replay, Wait
from replica.device.build import sizes_of
from replica.device.runner import DeviceRunner
from replica.device.sizes import Limits
from replica.engine.engine import Engine
from replica.runners.request import Scheduled
from replica.runners.runner import Finish
from tests.gpu.engines import BLOCK, engine_of, greedy, made, runner_of, submit, tokens
from tests.gpu.place import Place
from tests.gpu.report import Figures, Table
from tests.replica.shapes import QWEN3_06B

TITLE = "steps of a Qwen3-0.6B with random weights, after 512 tokens of context"
BATCHES, CONTEXT, STEPS = (1, 32, 128), 512, 64
PROMPTS = (40, 600)  # tokens of each step's new request
IN_BETWEEN = 8  # uncounted steps: the first ones fill the pipeline
MAX_HOST_MS = 1.0


class Patient(Accelerator):
    """An accelerator that measures the host's waits for it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.device = accelerator.device
        self.waited_s = 0.0

    def host_bytes(self, size: int) -> torch.Tensor:
        return self._accelerator.host_bytes(size)

    def pool(self) -> object:
        return self._accelerator.pool()

    def capture(self, run: Callable[[], object], pool: Any) -> Replay:
        return self._accelerator.capture(run, pool)

    def mark(self) -> Wait:
        wait = self._accelerator.mark()

        def patiently() -> None:
            began_s = time.perf_counter()
            wait()
            self.waited_s += time.perf_counter() - began_s

        return patiently


class Watched:
    """A runner that records events at the beginning and end of the device's steps."""

    ahead = True
    adapters = None

    def __init__(self, runner: DeviceRunner, place: Place) -> None:
        self._runner = runner
        self._place = place
        self.num_blocks, self.vocab_size = runner.num_blocks, runner.vocab_size
        self.attention_name = runner.attention_name
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, batch: Sequence[Scheduled]) -> Finish:
        if not self._place.is_gpu:
            return self._runner.start(batch)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        finish = self._runner.start(batch)
        end.record()
        self.spans.append((begin, end))
        return finish

    def device_s(self) -> list[float]:
        self._place.synchronize()
        taken = [float(begin.elapsed_time(end)) / 1000 for begin, end in self.spans]
        self.spans.clear()
        return taken


class Split(NamedTuple):
    """Times of each step, in seconds."""

    whole: list[float]
    host: list[float]
    device: list[float]


def run(place: Place, table: Table) -> None:
    batches, context = place.size((BATCHES, CONTEXT), ((1, 4), 24))
    prompts = place.size(PROMPTS, PROMPTS[:1])
    limits = Limits(place.size(16_384, 128), max(batches) + 2, max(context + STEPS, *prompts) + BLOCK)
    accelerator = Patient(place.accelerator())
    of = made(place, QWEN3_06B, limits.tokens, accelerator)
    table.figure("start: model on the device", [of.seconds], "s")
    caches = of.caches_of(limits.requests * -(-limits.tokens // BLOCK))
    began_s = time.perf_counter()
    captured = runner_of(of, caches, limits)
    place.synchronize()
    table.figure(f"start: {len(sizes_of(limits, of.model.config))} graphs", [time.perf_counter() - began_s], "s")
    for name, runner in (("graphs", captured), ("no graphs", runner_of(of, caches, limits, graphs=False))):
        for batch in batches:
            split = steps_of(Watched(runner, place), accelerator, limits, batch, context)
            tell(table, f"{name}, batch {batch}", split, target=name == "graphs" and batch == BATCHES[-1])
        for batch, prompt in product(batches[1:], prompts):
            split = steps_of(Watched(runner, place), accelerator, limits, batch, context, prompt=prompt)
            tell(table, f"{name}, batch {batch} beside a prompt of {prompt} tokens", split, target=False)


def steps_of(
    runner: Watched,
    accelerator: Patient,
    limits: Limits,
    batch: int,
    context: int,
    *,
    prompt: int = 0,
    adapters: Sequence[str | None] = (None,),
) -> Split:
    """Times of steps in which `batch` requests decode, with these adapters by turns.

    With `prompt`, each step also gets a new one-token request.
    """
    engine, chance = engine_of(runner, limits), random.Random(0)

    def ask(number: int, length: int, outputs: int) -> None:
        one = greedy(tokens(chance, length, runner.vocab_size), outputs)
        submit(engine, [one._replace(adapter=adapters[number % len(adapters)])], first=number)

    for number in range(batch):
        ask(number, context, STEPS)
    while any(request.generated == 0 for request in engine.scheduler.requests.values()):
        engine.step()
    for _ in range(IN_BETWEEN):
        engine.step()
    runner.device_s()
    split = Split([], [], [])
    asked_ids = set(engine.scheduler.requests)
    while asked_ids <= engine.scheduler.requests.keys():
        if prompt:
            ask(batch + len(split.whole), prompt, 1)
        step_once(engine, accelerator, split)
    split.device.extend(runner.device_s())
    while engine.busy:
        engine.step()
    return split


def step_once(engine: Engine, accelerator: Patient, split: Split) -> None:
    accelerator.waited_s, began_s = 0.0, time.perf_counter()
    engine.step()
    whole_s = time.perf_counter() - began_s
    split.whole.append(whole_s)
    split.host.append(whole_s - accelerator.waited_s)


def tell(table: Table, name: str, split: Split, *, target: bool) -> None:
    def figure(what: str, values: list[float], **options: Any) -> None:
        table.figure(f"{name}: {what}", [1000 * Figures(values).median], "ms", **options)

    figure("a step", split.whole)
    figure("host: schedule, start and commit, without waiting", split.host, most=MAX_HOST_MS if target else 0.0)
    if split.device:
        figure("device, from a step's first work to its last", split.device)
