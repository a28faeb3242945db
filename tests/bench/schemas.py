"""A thousand random schemas over HTTP, with and without a kill; what free requests lose beside constrained ones.

Two engines of the demo model take turns step by step: one has free sequences only, in the other one half of them follow
a constraint. So both meet the same machine.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from api.openai.constraints import Constraint
from events.blocks import pack_tokens
from replica.engine.engine import Engine
from replica.grammar.compiler import Compiler
from replica.grammar.matcher import Matcher
from replica.messages import Sampling, Submit
from replica.model.demo import demo_folder
from tests.bench.masks import BATCH, ROUND_STEPS, beside_free_ones
from tests.chaos.schemas import TOGETHER, report
from tests.replica.grammar.constraints import tokenizer, vocabulary
from tests.replica.models import native

SCHEMAS = 1000


def run(rounds: int) -> None:
    for name, constraint in beside_free_ones().items():
        print(f"{name}: free ones lose {_lost(constraint, rounds):.2%}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        found = report(Path(folder), SCHEMAS, TOGETHER)
        print(f"{found.answers:,} schemas, each answered twice: all valid, and the same with a kill as without")
        print(f"{found.tokens:,} events, {found.kills} kills, {found.resumed} answers went on elsewhere", end="; ")
        print(f"{time.monotonic() - began_s:.0f} s")


def _lost(constraint: Constraint, rounds: int) -> float:
    """The throughput that free sequences lose: each step gives each of them one token.

    Every round takes the same steps. A step's time is its shortest one, since others on the machine only add to it.
    """
    free, beside = (
        np.min(times, axis=0).sum() for times in zip(*(_round(constraint) for _ in range(rounds)), strict=True)
    )
    return float(1 - free / beside)


def _round(constraint: Constraint) -> tuple[list[float], list[float]]:
    """The seconds of each step, with free sequences only and with constrained ones among them."""
    free, beside = (native(demo_folder(), num_blocks=1024, max_model_len=1024, max_num_seqs=2 * BATCH) for _ in "ab")
    _submit(free, lambda: None)
    compiled = Compiler(vocabulary()).compile(constraint)
    _submit(beside, lambda: Matcher(compiled.deep_copy(), vocabulary()))
    spent_s: dict[Engine, list[float]] = {free: [], beside: []}
    order = [free, beside]
    while free.busy and beside.busy:
        for engine in order:
            began_s = time.process_time()
            engine.step()
            spent_s[engine].append(time.process_time() - began_s)
        order.reverse()
    assert not free.busy and not beside.busy, "both take the same steps"
    return spent_s[free], spent_s[beside]


def _submit(engine: Engine, matcher: Callable[[], Matcher | None]) -> None:
    size = tokenizer().vocab_size
    for number in range(2 * BATCH):
        sampling = Sampling(max_tokens=ROUND_STEPS, temperature=1.0, seed=number)
        prompt = pack_tokens([(number * 7 + place) % size for place in range(32)])
        refused = engine.submit(Submit(number, prompt, sampling), matcher() if number % 2 else None)
        assert refused is None, refused
