"""Engines that run ahead against the same dumb model, and against engines that do not.

The runner's memory is written and read in the order of the steps, as a device's is: so nobody can be given blocks that
a step which still flies, or that was computed for nothing, has spoilt.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import rule

from replica.engine.engine import Engine
from replica.engine.scheduler import Scheduler
from replica.runners.request import Request
from tests.replica.ahead import AheadRunner
from tests.replica.careless import run_careless
from tests.replica.engine.test_scheduler_property import (
    EOS,
    MODEL_LEN,
    SAME,
    StrictRunner,
    World,
    prompts,
)
from tests.replica.engines import RememberingRunner, engine, step, submit


class StrictAheadRunner(AheadRunner, StrictRunner):
    """Holds the scheduler to its limits, too."""


class AheadWorld(World):
    runner_type = StrictAheadRunner

    @rule(prompt=prompts, max_tokens=st.integers(1, 14), seed=st.integers(0, 1))
    def a_penalized_one_arrives(self, prompt: list[int], max_tokens: int, seed: int) -> None:
        self.send(prompt, max_tokens, seed, frequency_penalty=0.5)


TestAheadEngine = AheadWorld.TestCase


# ---- beside an engine that waits for each step

arrivals = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=12),
        "max_tokens": st.integers(1, 14),
        "seed": st.integers(0, 2),
        "priority": st.sampled_from([0.0, 0.0, 1.0]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "stop_token_ids": st.sampled_from([(EOS,), (EOS,), (), (0,)]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.0, 1.2]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "top_logprobs": st.sampled_from([None, 2]),
    }
)
scripts = st.lists(
    st.one_of(
        arrivals.map(lambda own: ("arrive", own)),
        st.integers(0, 12).map(lambda which: ("cancel", which)),
        st.integers(1, 5).map(lambda steps: ("step", steps)),
    ),
    max_size=20,
)


class Heard:
    """All output of a request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[object] = []
        self.prompt_logprobs: object = None
        self.reason: str | None = None

    def starts_like(self, other: "Heard") -> bool:
        count = min(len(self.tokens), len(other.tokens))
        return (self.tokens[:count], self.logprobs[:count]) == (other.tokens[:count], other.logprobs[:count])


def play(one: Engine, script: list[tuple[str, Any]]) -> tuple[dict[int, Heard], set[int]]:
    """Run the whole script; return each request's outputs, and the requests that were cancelled."""
    heard: dict[int, Heard] = {}
    cancelled: set[int] = set()

    def go(steps: int) -> None:
        for _ in range(steps):
            if not one.busy:
                return
            for output in step(one):
                who = heard[output.id]
                who.tokens += output.token_ids
                who.logprobs += output.logprobs or []
                who.prompt_logprobs = who.prompt_logprobs or output.prompt_logprobs
                assert who.reason is None
                who.reason = output.finish_reason

    for action, argument in script:
        if action == "step":
            go(argument)
        elif action == "cancel":
            if one.cancel(argument):
                cancelled.add(argument)
        else:
            number = len(heard)
            heard[number] = Heard()
            assert submit(one, number, **argument) is None
    go(3000)
    assert not one.busy
    assert one.pool.free == one.pool.num_blocks
    return heard, cancelled


@given(
    script=scripts,
    room=st.integers(MODEL_LEN, 40),
    size=st.integers(1, 4),
    seqs=st.integers(1, 5),
    spare=st.integers(0, 20),
    partial=st.booleans(),
)
def test_answers_equal_those_of_an_engine_that_waits_for_each_step(
    script: list[tuple[str, Any]], room: int, size: int, seqs: int, spare: int, partial: bool
) -> None:
    own = {
        "num_blocks": -(-room // size),
        "block_size": size,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": seqs + spare,
        "enable_partial_reuse": partial,
        "max_waiting": 100,
    }
    (expected, gone), (heard, gone_ahead) = (
        play(engine(runner=runner, **own, **SAME), script) for runner in (RememberingRunner, AheadRunner)
    )
    for number, told in heard.items():
        assert told.starts_like(expected[number])
        if number not in gone | gone_ahead:
            assert vars(told) == vars(expected[number])


# ---- negative controls


def never_needs_results(_: Request) -> bool:
    return False


def always(_: Scheduler) -> bool:
    return True


@pytest.mark.parametrize(
    ("owner", "name", "careless", "said"),
    [
        (
            Scheduler,
            "may_run_ahead",
            always,
            "preempted while it is computed|from unknown tokens|mixes up its scores",
        ),
        pytest.param(
            Request,
            "needs_results",
            property(never_needs_results),
            "samples from unknown tokens|mixes up its scores",
            marks=pytest.mark.grid,
        ),
        pytest.param(
            Request,
            "decodes",
            property(lambda request: request.remaining == 1),
            "continues after its last token|lacks",
            marks=pytest.mark.grid,
        ),
    ],
)
def test_the_property_fails_for_a_scheduler_that_is_careless(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, careless: Callable[..., object], said: str
) -> None:
    monkeypatch.setattr(owner, name, careless)
    with pytest.raises(AssertionError, match=said):
        run_careless(AheadWorld)
