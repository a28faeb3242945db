"""Requests whose prompt one simulated replica computes for another one."""

from typing import Literal

import pytest
from msgspec.structs import replace

from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, TraceRequest
from replica.cache.moves import PULLED

RATE, PULL_RATE = 8000.0, 40_000.0
TOKENS = 8000
PAIR = Settings(replicas=2, prefill_replicas=1, pull_tokens_per_s=PULL_RATE, model="engine")


def chat(number: int) -> TraceRequest:
    """A short prompt with a long answer."""
    return TraceRequest(0.001 * number, 64, 400, (10_000 + number,))


def long_prompt(at_s: float = 2.0) -> TraceRequest:
    return TraceRequest(at_s, TOKENS, 10, tuple(range(TOKENS // 64)))


def run(settings: Settings, *requests: TraceRequest) -> list[Job]:
    return simulated(Trace("t", 64, requests), settings, "cost", seed=0)


@pytest.mark.parametrize("model", ["engine", "fifo"])
def test_a_long_prompt_beside_answers_is_computed_elsewhere_and_read(model: Literal["engine", "fifo"]) -> None:
    *chats, long = run(replace(PAIR, model=model), *map(chat, range(8)), long_prompt())
    assert long.prefill is not None
    assert (long.prefill.replica, long.replica) == (0, 1)
    assert long.prefill.uncached_tokens == TOKENS
    assert long.brought_tokens == {PULLED: TOKENS - 64}, "the last token is always computed"
    assert long.uncached_tokens == 64
    assert long.ttft_s == pytest.approx(TOKENS / RATE + TOKENS / PULL_RATE, abs=0.2)
    assert all(one.prefill is None and one.replica == 1 for one in chats)


def test_the_answers_beside_it_do_not_wait() -> None:
    requests = [*map(chat, range(8)), long_prompt()]
    apart, *_ = run(PAIR, *requests)
    together, *_ = run(replace(PAIR, replicas=1, prefill_replicas=0), *requests)
    assert together.ended_s - apart.ended_s == pytest.approx(TOKENS / RATE, abs=0.15)


def test_a_prompt_stays_where_nothing_waits_for_it() -> None:
    [alone] = run(PAIR, long_prompt())
    assert (alone.prefill, alone.replica, alone.uncached_tokens) == (None, 1, TOKENS)


def test_some_replica_has_to_generate() -> None:
    with pytest.raises(ValueError, match="none generates"):
        run(replace(PAIR, prefill_replicas=2), long_prompt())
