"""Measure prefix caching on six kinds of traffic: the real engine in virtual time, with and without the cache.

The generators follow a table of hit rates and savings that others report for such traffic. They were written before the
first run and must not be tuned; results outside of the reported ranges are marked.

The table's request rates are a cluster's. The one simulated replica gets an equal share of them, small enough for a
prefill load of 0.6 on a replica without a cache. Its speed is fitted to published times to first token of a 70B
model on four H100 (82, 245 and 890 ms for 512, 2,048 and 8,192 tokens): 28 ms a step and 9,505 prefill tokens/s.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from events.blocks import pack_tokens
from replica.config import EngineConfig, SimulatedConfig
from replica.engine.engine import Engine
from replica.messages import Output, Sampling, Submit
from replica.runners.clock import VirtualClock
from replica.runners.simulated import SimulatedRunner

PREFILL_TOKENS_PER_S = 9505.0
STEP_S = 0.028
LOAD = 0.6
BLOCK = 16
POOL_BLOCKS = 26_702
SPAN_S = 600.0
WARM_UP_S = 240.0
THINK_S = 10.0
LONGEST_CONVERSATION = 4096
TURNS = 15
VOCABULARY = 150_000


class Prompt(NamedTuple):
    tokens: list[int]
    output_tokens: int


class Conversation:
    """A conversation; each turn's prompt is the whole history."""

    def __init__(self, system: list[int]) -> None:
        self.history = list(system)

    def turn(self, chance: random.Random) -> Prompt:
        self.history += text(chance, chance.randint(50, 150))
        return Prompt(list(self.history), chance.randint(50, 150))


class Workload(NamedTuple):
    """A kind of traffic. Mean prompt length decides the share of one replica; `reported` is the field's figure."""

    name: str
    requests_per_s: float
    mean_prompt_tokens: float
    prompts: Callable[[random.Random], Iterator[Prompt | Conversation]]
    reported_hits: str
    reported_ttft: str


class Result(NamedTuple):
    hit_rate: float
    block_hit_rate: float
    mean_ttft_s: float
    requests: int


def text(chance: random.Random, tokens: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(tokens)]


def chatbot(chance: random.Random) -> Iterator[Prompt]:
    """Prompts with one system prompt of 512 tokens, then a message of 16 to 48."""
    system = text(chance, 512)
    while True:
        yield Prompt(system + text(chance, chance.randint(16, 48)), chance.randint(32, 128))


def multi_turn(chance: random.Random) -> Iterator[Conversation]:
    """Conversations that begin with the same 1,024 tokens and end when they have 4,096, after about 15 turns."""
    system = text(chance, 1024)
    while True:
        yield Conversation(system)


def rag(chance: random.Random) -> Iterator[Prompt]:
    """Prompts of 256 tokens of instructions, then 2,048 tokens of documents and question that none share."""
    instructions = text(chance, 256)
    while True:
        yield Prompt(instructions + text(chance, 2048), chance.randint(64, 192))


def code_completion(chance: random.Random) -> Iterator[Prompt]:
    """A context of 500 to 8,000 tokens; a quarter of the requests continue where another stopped."""
    recent: list[list[int]] = []
    while True:
        if recent and chance.random() < 0.25:
            context = recent.pop(chance.randrange(len(recent))) + text(chance, chance.randint(5, 40))
        else:
            context = text(chance, chance.randint(500, 8000))
        recent = [*recent[-49:], context]
        yield Prompt(context, chance.randint(8, 48))


def summarization(chance: random.Random) -> Iterator[Prompt]:
    """64 tokens of instructions, then a document of 300 to 900."""
    instructions = text(chance, 64)
    while True:
        yield Prompt(instructions + text(chance, chance.randint(300, 900)), chance.randint(64, 128))


def unrelated(chance: random.Random) -> Iterator[Prompt]:
    """Prompts of 100 to 1,000 tokens that share nothing."""
    while True:
        yield Prompt(text(chance, chance.randint(100, 1000)), chance.randint(32, 128))


WORKLOADS = (
    Workload("chatbot", 100, 544, chatbot, "92-97 %", "-78 %"),
    Workload("multi-turn chat", 50, 2560, multi_turn, "80-95 %", "-65 to -85 %"),
    Workload("RAG", 200, 2304, rag, "25-40 %", "-10 to -18 %"),
    Workload("code completion", 300, 4250, code_completion, "15-35 %", "-8 to -25 %"),
    Workload("batch summarization", 500, 664, summarization, "8-15 %", "-2 to -5 %"),
    Workload("random", 100, 550, unrelated, "0-2 %", "0 %"),
)


def run(rounds: int) -> None:
    columns = ("traffic", "replicas", "requests", "token hits", "block hits", "TTFT without", "with", "change")
    print(f"| {' | '.join(columns)} | reported hits and change |")
    print("| --- " * (len(columns) + 1) + "|")
    for workload in WORKLOADS:
        replicas = round(workload.requests_per_s * workload.mean_prompt_tokens / (LOAD * PREFILL_TOKENS_PER_S))
        share = workload.requests_per_s / replicas
        cached = [Replay(workload, share, seed, caching=True).run() for seed in range(rounds)]
        plain = [Replay(workload, share, seed, caching=False).run() for seed in range(rounds)]
        hits, blocks = middle(r.hit_rate for r in cached), middle(r.block_hit_rate for r in cached)
        with_s, without_s = middle(r.mean_ttft_s for r in cached), middle(r.mean_ttft_s for r in plain)
        change = middle(c.mean_ttft_s / p.mean_ttft_s - 1 for c, p in zip(cached, plain, strict=True))
        print(
            f"| {workload.name} | {replicas} | {cached[0].requests} | **{hits:.1%}** | {blocks:.1%} "
            f"| {without_s:.3f} s | {with_s:.3f} s | **{change:+.0%}** "
            f"| {workload.reported_hits}, {workload.reported_ttft} |",
            flush=True,
        )


def middle(figures: Iterable[float]) -> float:
    return statistics.median(figures)


class Replay:
    """Replay of one replica's share of the traffic; requests before WARM_UP_S fill the cache and are not counted."""

    def __init__(self, workload: Workload, requests_per_s: float, seed: int, *, caching: bool) -> None:
        self.chance = random.Random(f"{workload.name} {seed}")
        self.clock = VirtualClock()
        config = EngineConfig(
            model="m",
            engine="simulated",
            num_blocks=POOL_BLOCKS,
            max_model_len=16_384,
            max_waiting=10**9,
            enable_prefix_caching=caching,
            simulated=SimulatedConfig(
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S, decode_tokens_per_s=1 / STEP_S, step_overhead_s=0.0
            ),
        )
        self.engine = Engine(config, SimulatedRunner(config.simulated, self.clock, (0, VOCABULARY)), self.clock)
        self.numbers = itertools.count()
        self.coming: list[tuple[float, int, Prompt | Conversation]] = []  # a heap
        self.waiting: dict[int, tuple[float, int]] = {}  # for their first token: time of arrival, prompt tokens
        self.conversations: dict[int, Conversation] = {}
        self.ttft_s: list[float] = []
        self.prompt_tokens = self.cached_tokens = self.prompt_blocks = self.cached_blocks = 0
        rate = requests_per_s / TURNS if workload.prompts is multi_turn else requests_per_s
        at_s = 0.0
        for coming in workload.prompts(self.chance):
            at_s += self.chance.expovariate(rate)
            if at_s > SPAN_S:
                break
            self.coming.append((at_s, next(self.numbers), coming))

    def run(self) -> Result:
        while self.coming or self.engine.busy:
            if not self.engine.busy:
                self.clock.sleep(max(0.0, self.coming[0][0] - self.clock.now_s()))
            while self.coming and self.coming[0][0] <= self.clock.now_s():
                self.arrive(*heapq.heappop(self.coming))
            for output in self.engine.step():
                self.take(output)
        self.engine.check()
        token_hits, block_hits = self.cached_tokens / self.prompt_tokens, self.cached_blocks / self.prompt_blocks
        return Result(token_hits, block_hits, statistics.fmean(self.ttft_s), len(self.ttft_s))

    def arrive(self, at_s: float, number: int, coming: Prompt | Conversation) -> None:
        prompt = coming.turn(self.chance) if isinstance(coming, Conversation) else coming
        sampling = Sampling(max_tokens=prompt.output_tokens, ignore_eos=True, seed=number)
        assert self.engine.submit(Submit(number, pack_tokens(prompt.tokens), sampling)) is None
        self.waiting[number] = at_s, len(prompt.tokens)
        if isinstance(coming, Conversation):
            self.conversations[number] = coming

    def take(self, output: Output) -> None:
        if output.id in self.waiting:
            self.count(*self.waiting.pop(output.id), output.cached_tokens)
        conversation = self.conversations.get(output.id)
        if conversation is None:
            return
        conversation.history += output.token_ids
        if output.finish_reason is not None:
            del self.conversations[output.id]
            if len(conversation.history) < LONGEST_CONVERSATION:
                next_s = self.clock.now_s() + self.chance.expovariate(1 / THINK_S)
                heapq.heappush(self.coming, (next_s, next(self.numbers), conversation))

    def count(self, at_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """A first token has come."""
        if at_s < WARM_UP_S:
            return
        self.ttft_s.append(self.clock.now_s() - at_s)
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.prompt_blocks += prompt_tokens // BLOCK
        self.cached_blocks += cached_tokens // BLOCK
