"""Measure reuse inside blocks: its savings where texts fork within a block.

The real engine computes each traffic in virtual time, with reuse of whole blocks only, and of parts of blocks, too. The
bound is a token-level radix tree with infinite memory: it knows every token of every request admitted before, also in
the same step, and computes at least the last token of a prompt.

One row is far above the bound on purpose: requests that arrive together, with less than a block in common beyond the
cache, each compute that common part. Waiting a step for the first of them would meet the bound, and raise that row's
TTFT from 45 to 57 ms.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from events.blocks import pack_tokens
from replica.config import EngineConfig, SimulatedConfig
from replica.engine.engine import Engine
from replica.messages import Output, Sampling, Submit
from replica.runners.clock import VirtualClock
from replica.runners.request import Request, Scheduled
from replica.runners.runner import SampledToken
from replica.runners.simulated import SimulatedRunner
from tests.bench.workloads import Conversation, Prompt, text

BLOCK = 16
POOL_BLOCKS = 26_702
VOCABULARY = 150_000
SPEED = SimulatedConfig(prefill_tokens_per_s=9505.0, decode_tokens_per_s=1 / 0.028, step_overhead_s=0.0)

Arrival: TypeAlias = tuple[float, Prompt | Conversation]


class Workload(NamedTuple):
    name: str
    arrivals: Callable[[random.Random], Iterator[Arrival]]
    target: str = "<= 2 %"


class Result(NamedTuple):
    prompt_tokens: int
    computed_tokens: int
    bound_tokens: int
    mean_ttft_s: float


def forks(prompt_tokens: Sequence[int], gap_s: float) -> Callable[[random.Random], Iterator[Arrival]]:
    """Twenty prompts, each continued by 24 suffixes; all at once, or one after the other."""

    def arrivals(chance: random.Random) -> Iterator[Arrival]:
        at_s = 0.0
        for _ in range(20):
            shared = text(chance, chance.choice(prompt_tokens) + chance.randrange(BLOCK))
            at_s += 30.0
            for _ in range(24):
                at_s += gap_s
                yield at_s, Prompt(shared + text(chance, chance.randint(1, 60)), chance.randint(8, 64))

    return arrivals


def choices(chance: random.Random) -> Iterator[Arrival]:
    """Eight answers to each of 60 prompts: the same prompt eight times, together."""
    for number in range(60):
        prompt = text(chance, chance.randint(20, 800))
        for _ in range(8):
            yield 10.0 * number, Prompt(prompt, chance.randint(8, 64))


def short_choices(chance: random.Random) -> Iterator[Arrival]:
    """Eight answers to each of 60 messages of less than a block or little more, after one system prompt."""
    system = text(chance, 512)
    for number in range(60):
        message = text(chance, chance.randint(4, 24))
        for _ in range(8):
            yield 10.0 * number, Prompt(system + message, chance.randint(8, 64))


def chat(chance: random.Random) -> Iterator[Arrival]:
    """Forty conversations with one system prompt, of about 15 turns; no turn ends where a block does."""
    system = text(chance, 333)
    for _ in range(40):
        yield chance.uniform(0, 60), Conversation(system)


def tree(gap_s: float) -> Callable[[random.Random], Iterator[Arrival]]:
    """Few-shot prompts and agents: each of 600 continues one of the last 60 texts, cut at any token."""

    def arrivals(chance: random.Random) -> Iterator[Arrival]:
        texts = [text(chance, 400)]
        at_s = 0.0
        for _ in range(600):
            at_s += chance.expovariate(1 / gap_s)
            parent = chance.choice(texts[-60:])
            texts.append(parent[: chance.randrange(1, len(parent) + 1)] + text(chance, chance.randint(10, 200)))
            yield at_s, Prompt(texts[-1], chance.randint(8, 64))

    return arrivals


def unrelated(chance: random.Random) -> Iterator[Arrival]:
    for number in range(400):
        yield 0.3 * number, Prompt(text(chance, chance.randint(100, 1000)), chance.randint(8, 64))


WORKLOADS = (
    Workload("forks of 40 tokens, together", forks([40], 0.0)),
    Workload("forks of 200 to 1,000 tokens, together", forks([200, 400, 1000], 0.0)),
    Workload("the same, one after the other", forks([200, 400, 1000], 5.0)),
    Workload("forks of 4,000 tokens, 20 a second", forks([4000], 0.05)),
    Workload("8 choices of a prompt", choices),
    Workload("8 choices of a short message", short_choices, target=""),
    Workload("multi-turn chat", chat),
    Workload("trees, 2 a second", tree(0.5)),
    Workload("trees, 20 a second", tree(0.05)),
    Workload("nothing shared", unrelated, target=""),
)


class Trie:
    """Every token sequence that was ever added; nodes are numbers."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}  # by the parent's number and the token in one

    def known(self, tokens: Sequence[int]) -> int:
        """Length of the known prefix, in tokens."""
        node = 0
        for count, token in enumerate(tokens):
            node = self._children.get(node << 32 | token, 0)
            if not node:
                return count
        return len(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        node = 0
        for token in tokens:
            node = self._children.setdefault(node << 32 | token, len(self._children) + 1)


class Witness(SimulatedRunner):
    """Asks the trie about every request at its admission, in that order."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(SPEED, clock, (0, VOCABULARY))
        self.trie = Trie()
        self.bound_tokens = 0
        self.seen: dict[int, Request] = {}

    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        for request, *_ in batch:
            if request.id not in self.seen:
                self.seen[request.id] = request
                prompt = request.chain.tokens[: request.prompt_tokens]
                self.bound_tokens += len(prompt) - self.trie.known(prompt[:-1])
                self.trie.add(prompt)
        return super().run(batch)

    def finish(self, request_id: int) -> None:
        """The last token was sampled and not computed."""
        self.trie.add(self.seen[request_id].chain.tokens[:-1])


class Replay:
    def __init__(self, workload: Workload, *, partial: bool) -> None:
        self.chance = random.Random(workload.name)
        self.clock = VirtualClock()
        self.runner = Witness(self.clock)
        config = EngineConfig(
            model="m",
            engine="simulated",
            num_blocks=POOL_BLOCKS,
            max_model_len=16_384,
            max_waiting=10**9,
            enable_partial_reuse=partial,
            simulated=SPEED,
        )
        self.engine = Engine(config, self.runner, self.clock)
        self.numbers = itertools.count()
        self.coming = [(at_s, next(self.numbers), coming) for at_s, coming in workload.arrivals(self.chance)]
        heapq.heapify(self.coming)
        self.conversations: dict[int, Conversation] = {}
        self.arrived_s: dict[int, float] = {}
        self.ttft_s: list[float] = []

    def run(self) -> Result:
        while self.coming or self.engine.busy:
            if not self.engine.busy:
                self.clock.sleep(max(0.0, self.coming[0][0] - self.clock.now_s()))
            while self.coming and self.coming[0][0] <= self.clock.now_s():
                self.arrive(*heapq.heappop(self.coming))
            for output in self.engine.step():
                self.take(output)
        stats = self.engine.stats()
        assert not stats.preemptions
        mean_ttft_s = sum(self.ttft_s) / len(self.ttft_s)
        return Result(stats.prompt_tokens, stats.computed_prompt_tokens, self.runner.bound_tokens, mean_ttft_s)

    def arrive(self, at_s: float, number: int, coming: Prompt | Conversation) -> None:
        prompt = coming.turn(self.chance) if isinstance(coming, Conversation) else coming
        sampling = Sampling(max_tokens=prompt.output_tokens, ignore_eos=True, seed=number)
        assert self.engine.submit(Submit(number, pack_tokens(prompt.tokens), sampling)) is None
        self.arrived_s[number] = at_s
        if isinstance(coming, Conversation):
            self.conversations[number] = coming

    def take(self, output: Output) -> None:
        arrived_s = self.arrived_s.pop(output.id, None)
        if arrived_s is not None:
            self.ttft_s.append(self.clock.now_s() - arrived_s)
        if output.finish_reason is not None:
            self.runner.finish(output.id)
        conversation = self.conversations.get(output.id)
        if conversation is None:
            return
        conversation.history += output.token_ids
        if output.finish_reason is not None and len(conversation.history) < 3300:
            next_s = self.clock.now_s() + self.chance.expovariate(1 / 10)
            heapq.heappush(self.coming, (next_s, next(self.numbers), conversation))


def run(rounds: int) -> None:
    del rounds  # nothing varies
    columns = ("traffic", "prompt tokens", "whole blocks", "with parts", "radix tree", "TTFT whole", "TTFT parts")
    print(f"| {' | '.join(columns)} | above the radix tree | target |")
    print("| --- " * (len(columns) + 2) + "|")
    for workload in WORKLOADS:
        whole, parts = (Replay(workload, partial=partial).run() for partial in (False, True))
        above_whole, above = (of.computed_tokens / of.bound_tokens - 1 for of in (whole, parts))
        print(
            f"| {workload.name} | {parts.prompt_tokens:,} | {whole.computed_tokens:,} | {parts.computed_tokens:,} "
            f"| {parts.bound_tokens:,} | {whole.mean_ttft_s * 1000:.1f} ms | {parts.mean_ttft_s * 1000:.1f} ms "
            f"| {above_whole:+.1%} -> **{above:+.1%}** | {workload.target} |",
            flush=True,
        )
