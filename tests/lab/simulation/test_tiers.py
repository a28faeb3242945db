"""Replicas with memory below their caches, in virtual time."""

from typing import Literal, TypeAlias

import pytest
from msgspec.structs import replace

from lab.simulation.comparison import outcome_of
from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, TraceRequest, at_rate
from replica.cache.lower import DISK
from replica.cache.moves import PULLED
from tests.lab.traffic import conversations

Model: TypeAlias = Literal["fifo", "engine"]

RATE = 8000.0
SMALL = Settings(replicas=1, capacity_tokens=3200, host_tokens=16_000, load_tokens_per_s=100_000.0)
CHATS = at_rate(conversations(300), 0.9 * 4 * RATE)


def prompt(at_s: float, number: int, tokens: int = 1600) -> TraceRequest:
    return TraceRequest(at_s, tokens, 1, tuple(range(number * 1000, number * 1000 + tokens // 16)))


def run(settings: Settings, *numbers: int) -> list[Job]:
    """Send prompts of these numbers, each after the one before it has ended."""
    requests = [prompt(10.0 * place, number) for place, number in enumerate(numbers)]
    return simulated(Trace("t", 16, requests), settings, "cost", seed=0)


def test_what_left_host_memory_comes_from_the_disk() -> None:
    settings = replace(SMALL, host_tokens=3200, disk_tokens=32_000, disk_tokens_per_s=20_000.0)
    *_, again = run(settings, 0, 1, 2, 3, 4, 5, 6, 0)
    assert again.brought_tokens == {DISK: 1584}
    assert again.ttft_s == pytest.approx(1584 / 20_000 + 16 / RATE)
    *_, lost = run(replace(settings, disk_tokens=0), 0, 1, 2, 3, 4, 5, 6, 0)
    assert lost.uncached_tokens == 1600


def test_a_medium_that_is_slower_than_computing_is_not_used() -> None:
    *_, again = run(replace(SMALL, load_tokens_per_s=RATE / 2), 0, 1, 2, 0)
    assert not again.brought_tokens
    assert again.ttft_s == pytest.approx(1600 / RATE)


def test_the_engine_loads_while_it_computes_and_wakes_up_when_only_loads_are_left() -> None:
    engine = replace(SMALL, model="engine", capacity_tokens=4000)
    *_, alone = run(engine, 0, 1, 2, 3, 0)
    assert sum(alone.brought_tokens.values()) > 0
    assert alone.ttft_s < 1584 / 100_000 + 2 * 16 / RATE + 2 / 40
    slow = replace(engine, load_tokens_per_s=10_000.0, decode_tokens_per_s=1000.0)
    requests = [*(prompt(10.0 * number, number) for number in range(4)), prompt(40.0, 0), prompt(40.001, 9, 800)]
    *_, loading, computing = simulated(Trace("t", 16, requests), slow, "cost", seed=0)
    assert computing.first_s < loading.first_s, "it is computed while the other one is loaded"


@pytest.mark.parametrize("model", ["fifo", "engine"])
def test_host_memory_saves_computing_on_conversations(model: Model) -> None:
    few = Trace(CHATS.name, CHATS.block_tokens, CHATS.requests[: 300 if model == "fifo" else 120])
    small = Settings(replicas=2, capacity_tokens=200_000, model=model)
    plain, tiered = (
        outcome_of(simulated(few, one, "cost", 0), 2, RATE) for one in (small, replace(small, host_tokens=2_000_000))
    )
    assert tiered.hit_rate > plain.hit_rate + 0.02
    assert tiered.ttft_mean_s < plain.ttft_mean_s
    assert tiered.brought_rate > 0 == plain.brought_rate


# ---- reading from neighbours

PAIR = replace(SMALL, replicas=2, capacity_tokens=20_000, host_tokens=0, pull_tokens_per_s=160_000.0)


@pytest.mark.parametrize("model", ["fifo", "engine"])
def test_a_prompt_that_goes_elsewhere_is_read_from_where_it_is(model: Model) -> None:
    """The replica that has it is busy with a long prompt when it comes again."""
    requests = [prompt(0.0, 0), prompt(20.0, 0, 16_000), prompt(20.1, 0)]
    first, long, again = simulated(Trace("t", 16, requests), replace(PAIR, model=model), "cost", seed=0)
    assert first.replica == long.replica != again.replica
    assert again.brought_tokens == {PULLED: 1584}
    assert again.uncached_tokens == 16
