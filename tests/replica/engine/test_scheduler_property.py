"""Whole engines in virtual time against a dumb model: every request gets its own answer.

The answer is the one of an engine that has no cache and all the room in the world. The runner keeps a memory and
compares what a request reads there with what it should have written, so a wrong reuse cannot hide behind right tokens.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from events.cache.resolver import Resolver
from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.cache.names import Match
from replica.config import SimulatedConfig
from replica.engine.engine import Engine
from replica.messages import Output
from replica.runners.request import Scheduled
from replica.runners.runner import SampledToken
from tests.replica.careless import run_careless
from tests.replica.engines import MODEL, RememberingRunner, drain, engine, submit

EOS = 2
MODEL_LEN = 24
SPEED = SimulatedConfig(mean_output_tokens=8)
# Two tokens to read and to write, so that prompts and answers meet; EOS ends an answer.
SAME: dict[str, Any] = {"vocabulary": (0, 3), "eos_token_ids": (EOS,), "simulated": SPEED, "max_model_len": MODEL_LEN}

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
indices = st.integers(0, 100)


@lru_cache(maxsize=20_000)
def answer(prompt: tuple[int, ...], max_tokens: int, seed: int) -> tuple[int, ...]:
    """The answer to a request that is alone in a big engine without a cache."""
    alone = engine(num_blocks=100, enable_prefix_caching=False, max_num_batched_tokens=100, **SAME)
    assert submit(alone, 0, prompt, max_tokens, seed=seed, stop_token_ids=(EOS,)) is None
    return tuple(drain(alone)[0])


class StrictRunner(RememberingRunner):
    """Also holds the scheduler to its limits."""

    budget = 0
    seqs = 0

    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        assert sum(scheduled.tokens for scheduled in batch) <= self.budget
        assert len({scheduled.request.id for scheduled in batch}) == len(batch) <= self.seqs
        assert all(start + count == request.launched and count > 0 for request, start, count, _ in batch)
        return super().run(batch)


class Expected:
    """An accepted request, and its outstanding output."""

    def __init__(self, prompt: list[int], said: tuple[int, ...], resumed: int, *, scored: bool) -> None:
        self.prompt = prompt
        self.scored = scored and not resumed  # the log probabilities of its prompt are wanted, and can be had
        self.resumed = resumed
        self.left = list(said[resumed:])
        self.cached: int | None = None

    def hear(self, output: Output, size: int, *, partial: bool) -> None:
        if self.scored and self.cached is None:
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(self.prompt) - 1
        else:
            assert output.prompt_logprobs is None
        assert output.token_ids == self.left[: len(output.token_ids)]
        del self.left[: len(output.token_ids)]
        ends = "stop" if output.token_ids == [EOS] else "length"
        assert output.finish_reason == (None if self.left else ends)
        assert self.cached in (None, output.cached_tokens), "the cached length changed since the last check"
        self.cached = output.cached_tokens
        assert self.cached <= len(self.prompt) - (not self.resumed)
        assert self.cached == 0 or not self.scored
        assert self.resumed or partial or self.cached % size == 0


class World(RuleBasedStateMachine):
    """Requests come with shared prefixes, priorities, salts, or half an answer; some go, some are preempted."""

    pool_type: type[BlockPool] = BlockPool
    runner_type: type[StrictRunner] = StrictRunner

    @initialize(
        room=st.integers(8, 50),
        size=st.integers(1, 4),
        seqs=st.integers(1, 5),
        spare=st.integers(0, 30),
        waiting=st.integers(1, 8),
        partial=st.booleans(),
    )
    def begin(self, room: int, size: int, seqs: int, spare: int, waiting: int, partial: bool) -> None:
        num_blocks = -(-room // size)
        limits = {"max_num_seqs": seqs, "max_num_batched_tokens": seqs + spare, "max_waiting": waiting}
        self.engine: Engine = engine(runner=self.runner_type, num_blocks=num_blocks, block_size=size, **limits, **SAME)
        assert isinstance(self.engine.runner, StrictRunner)
        self.engine.runner.budget, self.engine.runner.seqs = seqs + spare, seqs
        self.engine.pool = self.engine.scheduler.pool = self.pool_type(num_blocks, size, partial=partial)
        self.expected: dict[int, Expected] = {}
        self.past: list[list[int]] = []
        self.resolver = Resolver(MODEL, native=True)
        self.count = 0
        self.generated = 0

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 14),
        seed=st.integers(0, 1),
        resumed=st.sampled_from([0, 0, 0, 1, 3]),
        priority=st.sampled_from([0.0, 0.0, 1.0, -1.0]),
        cache_salt=st.sampled_from([None, None, None, "x"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def arrive(self, prompt: list[int], max_tokens: int, seed: int, resumed: int, **own: Any) -> None:
        self.send(prompt, max_tokens, seed, resumed, **own)

    @rule(prompt=prompts, sizes=st.lists(st.integers(1, 14), min_size=2, max_size=5))
    def a_crowd_arrives(self, prompt: list[int], sizes: list[int]) -> None:
        """Each with a part of one text, all at once: they share, and there is not room for all."""
        for count in sizes:
            self.send([*prompt, *prompt][:count], 14)

    @precondition(lambda self: self.past)
    @rule(which=indices, more=st.lists(st.integers(0, 1), min_size=1, max_size=4), max_tokens=st.integers(1, 10))
    def a_conversation_goes_on(self, which: int, more: list[int], max_tokens: int) -> None:
        self.send([*self.past[which % len(self.past)], *more], max_tokens)

    def send(self, prompt: list[int], max_tokens: int, seed: int = 0, resumed: int = 0, **own: Any) -> None:
        said = () if len(prompt) >= MODEL_LEN else answer(tuple(prompt), max_tokens, seed)
        resumed = min(resumed, max(0, len(said) - 1))
        self.count += 1
        self.past.append([*prompt, *(token for token in said if token != EOS)])
        refusal = self.refusal(len(prompt) + resumed, min(MODEL_LEN, len(prompt) + max_tokens))
        own |= {"output": said[:resumed], "seed": seed, "stop_token_ids": (EOS,)}
        refused = submit(self.engine, self.count, prompt, max_tokens, **own)
        assert (refused and refused.reason) == refusal
        if refused is None:
            scored = own.get("prompt_logprobs") is not None
            self.expected[self.count] = Expected(prompt, said, resumed, scored=scored)

    def refusal(self, tokens: int, longest: int) -> str | None:
        pool, scheduler = self.engine.pool, self.engine.scheduler
        if tokens >= MODEL_LEN or longest > pool.num_blocks * pool.block_size:
            return "too_long"
        places = scheduler.limits.max_num_seqs - scheduler.admitted
        return "full" if scheduler.waiting - places >= scheduler.limits.max_waiting else None

    @precondition(lambda self: self.expected)
    @rule(which=indices)
    def cancel(self, which: int) -> None:
        number = list(self.expected)[which % len(self.expected)]
        assert self.engine.cancel(number)
        assert not self.engine.cancel(number)
        del self.expected[number]
        self.verify()

    @rule()
    def reset(self) -> None:
        idle = not self.engine.scheduler.admitted
        assert self.engine.reset() == idle
        self.verify()

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        here, progress_before = bool(self.engine.scheduler.requests), self.progress()
        for output in self.engine.step():
            self.generated += len(output.token_ids)
            self.expected[output.id].hear(output, self.engine.pool.block_size, partial=self.engine.pool.partial)
            if output.finish_reason:
                del self.expected[output.id]
        self.verify()
        assert not here or self.progress() != progress_before, "a step with requests made no progress"

    def progress(self) -> tuple[object, ...]:
        scheduler = self.engine.scheduler
        running = [(request.id, request.computed, request.launched) for request in scheduler.running]
        return scheduler.generated_tokens, scheduler.preemptions, running

    def verify(self) -> None:
        self.engine.check()
        self.resolver.apply(self.engine.take_events())
        self.resolver.check()
        assert self.resolver.lost is None
        assert self.resolver.keys() == self.engine.pool.resident()
        assert self.engine.scheduler.requests.keys() == self.expected.keys()

    def teardown(self) -> None:
        """Finish all requests, and check that no block is held."""
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.busy:
                break
            self.one_step()
        assert self.expected == {}, "a request starved"
        assert self.engine.pool.free == self.engine.pool.num_blocks
        assert self.engine.scheduler.generated_tokens == self.generated
        assert self.engine.reset()
        self.verify()


TestEngine = World.TestCase


# ---- negative controls


class Mixing(BlockPool):
    """Shares blocks between equal tokens, despite different salts."""

    def match(self, chain: Chain) -> Match:
        plain = Chain(chain.tokens, chain.block_size, MODEL)
        return super().match(plain)


class Leaking(BlockPool):
    """Does not get back the last block of a request."""

    def release(self, blocks: Sequence[int], keep: int | None = None) -> None:  # noqa: ARG002
        super().release(blocks[:-1] or blocks)


class Shifted(BlockPool):
    """Hits one block more than matches."""

    def match(self, chain: Chain) -> Match:
        longer = super().match(chain)
        if len(longer.blocks) < (len(chain) - 1) // self.block_size and longer.blocks:
            return Match([*longer.blocks, next(b for b in range(self.num_blocks) if b not in longer.blocks)], 0)
        return longer


@pytest.mark.parametrize(
    "broken",
    [
        Mixing,
        *(pytest.param(pool, marks=pytest.mark.grid) for pool in (Leaking, Shifted)),
    ],
)
def test_the_property_fails_for_an_engine_with_a_broken_pool(broken: type[BlockPool]) -> None:
    with pytest.raises((AssertionError, ValueError)):  # the last steps of an example may stumble over the first fault
        run_careless(World, pool_type=broken)
