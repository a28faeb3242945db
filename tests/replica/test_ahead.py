"""An engine that starts a step before it has the previous step's results."""

from typing import Any

import pytest
import torch

from replica.config import SimulatedConfig
from replica.engine.engine import Engine
from replica.messages import Output, Sampling
from replica.runners.request import Request
from replica.runners.sampling import sample
from tests.replica.ahead import AheadRunner, ahead_engine
from tests.replica.engines import SIZE, chain, engine, generate, step, submit

PROMPT = list(range(100, 121))  # five blocks and a token


def land(of: Engine) -> list[Output]:
    """One step without work."""
    outputs = step(of)
    assert not of.busy
    return outputs


# ---- one step ahead


def test_a_step_is_started_before_the_results_of_the_one_before_are_asked_for() -> None:
    one, runner = ahead_engine()
    generate(one, PROMPT, 4)
    assert runner.log == [
        ("start", 0),
        ("start", 1),
        ("finish", 0),
        ("start", 2),
        ("finish", 1),
        ("start", 3),
        ("finish", 2),
        ("finish", 3),
    ]


def test_a_token_is_computed_before_anybody_knows_which_it_is() -> None:
    one, runner = ahead_engine()
    submit(one, 1, PROMPT)
    assert step(one) == []
    [output] = step(one)
    assert runner.batches == [[(1, 0, 21)], [(1, 21, 1)]]
    assert output.token_ids == generate(engine(), PROMPT, 1)[0]


# ---- how it ends


def test_a_stop_token_is_known_a_step_late_and_later_work_is_dropped() -> None:
    said, _ = generate(engine(), PROMPT, 9)
    stop = next(token for at, token in enumerate(said) if at and token not in said[:at])
    end = said.index(stop) + 1
    one, runner = ahead_engine()
    submit(one, 1, PROMPT, 9, stop_token_ids=(stop,))
    outputs: list[Output] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += step(one)
    assert [token for output in outputs for token in output.token_ids] == said[:end]
    assert outputs[-1].finish_reason == "stop"
    assert len(runner.batches) == end + 1
    assert (one.pool.free, one.scheduler.generated_tokens) == (64, end)
    assert one.busy  # the step for nothing still flies
    assert land(one) == []
    assert (one.steps, one.scheduler.generated_tokens) == (end + 1, end)


# ---- when it lands first


def crowd(**changes: Any) -> tuple[Engine, AheadRunner]:
    """Requests that fit on arrival, but not after they grow."""
    one, runner = ahead_engine(num_blocks=5, **changes)
    for number in range(4):
        submit(one, number, [number] * 7, 9, seed=number)
    return one, runner


def test_the_last_free_block_is_taken_ahead() -> None:
    one, runner = ahead_engine(num_blocks=6)
    submit(one, 1, [1] * 7, 9)
    submit(one, 2, [2] * 7, 9)
    for _ in range(3):  # both have two full blocks then, and there are two
        step(one)
    assert one.pool.free == 0
    assert runner.ahead_steps == 2


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalized_request_draws_when_all_its_tokens_are_known(penalty: str) -> None:
    one, runner = ahead_engine(max_num_batched_tokens=8)
    assert generate(one, PROMPT, 5, **{penalty: 1.5})[0] == generate(engine(), PROMPT, 5)[0]
    assert runner.ahead_steps == 2  # for the pieces of its prompt


@pytest.mark.parametrize(
    ("sampling", "ahead_steps"),
    [({"logit_bias": {3: 1.0}}, 0), ({"top_logprobs": 2}, 0), ({"min_tokens": 3, "stop_token_ids": (999,)}, 2)],
)
def test_what_the_host_has_a_hand_in_lets_the_others_have_their_tokens_first(
    sampling: dict[str, Any], ahead_steps: int
) -> None:
    """A runner may wait there for the step that it starts."""
    one, runner = ahead_engine()
    generate(one, PROMPT, 5, **sampling)
    assert runner.ahead_steps == ahead_steps
    assert one.steps == 5


@pytest.mark.parametrize(
    ("sampling", "is_penalized"),
    [
        ({"repetition_penalty": 0.5}, True),
        ({"presence_penalty": -1.0}, True),
        ({"frequency_penalty": 2.0}, True),
        ({}, False),
    ],
)
def test_a_request_is_taken_for_penalized_if_what_it_draws_depends_on_its_tokens(
    sampling: dict[str, Any], is_penalized: bool
) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.35, 0.4]])
    drawn = set()
    for tokens in ([0], [0, 1], [2, 2, 2], [3, 3], [4, 4]):
        request = Request(1, chain([0, *tokens]), 1, Sampling(max_tokens=9, temperature=0.0, **sampling), (0.0, 1))
        request.length += 1  # as if another one were being drawn
        assert request.needs_results == is_penalized
        drawn.add(sample(logits, [request])[0].token)
    assert (len(drawn) > 1) == is_penalized


# ---- what it says


def test_a_steps_time_begins_when_the_one_before_it_has_landed() -> None:
    speed = SimulatedConfig(prefill_tokens_per_s=1000, decode_tokens_per_s=10, step_overhead_s=0)
    measured = []
    for one in (engine(simulated=speed, num_blocks=100), ahead_engine(simulated=speed, num_blocks=100)[0]):
        generate(one, list(range(300)), 20)
        measured.append((one.clock.now_s(), one.steps, one.speed.step_s, one.speed.prefill_tokens_per_s))
    assert measured[0] == pytest.approx(measured[1])


@pytest.mark.parametrize(
    "harm",
    [
        lambda request: setattr(request, "launched", request.launched - 1),
        lambda request: setattr(request, "launched", request.launched + 1),
        lambda request: setattr(request, "length", request.length - 1),
        lambda request: setattr(request, "length", request.length + 1),
        lambda request: setattr(request, "computed", request.launched + 1),
        lambda request: request.blocks.pop(),
    ],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_check_notices_what_waits_for_what_does_not_fly(harm: Any, steps: int) -> None:
    one, _ = ahead_engine()
    submit(one, 1, PROMPT[:SIZE])
    for _ in range(steps):
        step(one)
    harm(one.scheduler.running[0])
    with pytest.raises(AssertionError):
        one.check()
