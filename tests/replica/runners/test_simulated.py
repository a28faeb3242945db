"""The simulated runner: its time and its tokens depend only on its inputs."""

import math
from typing import Any

import pytest

from replica.config import SimulatedConfig
from replica.messages import Sampling
from replica.runners.request import Request
from replica.runners.simulated import SimulatedRunner
from tests.replica.engines import chain, engine, generate
from tests.replica.tiers.simulated import VirtualClock

SPEED = SimulatedConfig(
    prefill_tokens_per_s=1000, decode_tokens_per_s=50, batch_slowdown=0.1, step_overhead_s=0.002, mean_output_tokens=6
)
EOS = 300


def runner(
    speed: SimulatedConfig = SPEED, vocabulary: tuple[int, int] = (0, 256), eos: tuple[int, ...] = ()
) -> SimulatedRunner:
    return SimulatedRunner(speed, VirtualClock(), vocabulary, eos)


def request(prompt: list[int], output: tuple[int, ...] = (), **sampling: Any) -> Request:
    own = Sampling(**{"max_tokens": 100, **sampling})
    return Request(1, chain([*prompt, *output]), len(prompt), own, (0.0, 1))


def sampled(prompt: list[int], count: int, by: SimulatedRunner | None = None, **sampling: Any) -> list[int]:
    one, said = by or runner(), []
    asked = request(prompt, **sampling)
    for _ in range(count):
        said.append(one.sample(asked).token)
        asked.chain.append(said[-1])
    return said


# ---- tokens


def test_tokens_depend_on_prompt_seed_and_position_alone() -> None:
    first = sampled([1, 2, 3], 20, seed=4)
    assert sampled([1, 2, 3], 20, seed=4) == first
    assert sampled([1, 2, 4], 20, seed=4) != first
    assert sampled([1, 2, 3], 20, seed=5) != first
    for position in range(20):  # whatever was said before it
        assert runner().sample(request([1, 2, 3], (0,) * position, seed=4)).token == first[position]


def test_tokens_are_of_the_vocabulary_and_never_end_the_answer_by_chance() -> None:
    said = sampled([1], 300, runner(vocabulary=(10, 20), eos=(12, 19)), ignore_eos=True)
    assert set(said) == set(range(10, 20)) - {12, 19}


def test_an_answer_ends_by_itself_near_the_mean_length() -> None:
    lengths = []
    for number in range(200):
        said = sampled([number], 20, runner(eos=(EOS,)))
        lengths.append(said.index(EOS))
    assert min(lengths) >= 1
    assert max(lengths) < 2 * SPEED.mean_output_tokens
    assert sum(lengths) / len(lengths) == pytest.approx(SPEED.mean_output_tokens, rel=0.15)


def test_an_answer_is_not_ended_before_min_tokens_or_when_the_end_is_ignored() -> None:
    for number in range(20):
        assert sampled([number], 20, runner(eos=(EOS,)), min_tokens=15).index(EOS) == 15
        assert EOS not in sampled([number], 40, runner(eos=(EOS,)), ignore_eos=True)


def test_an_answer_ends_with_its_end_token_and_says_stop() -> None:
    one = engine(eos_token_ids=(EOS,), simulated=SPEED)
    said, _ = generate(one, [1, 2, 3], 100, stop_token_ids=(EOS,))
    assert said[-1] == EOS
    assert EOS not in said[:-1]


# ---- log probabilities


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_the_drawn_token_is_the_likeliest_and_the_rest_follow(top: int) -> None:
    by = runner(vocabulary=(0, 5000))
    drawn = by.sample(request([1, 2], top_logprobs=top))
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == math.log(0.5)
    ranked = drawn.logprobs.top
    assert len(ranked) == top
    assert [token for token, _ in ranked[:1]] == [drawn.token][:top]
    assert len({token for token, _ in ranked}) == top
    assert [value for _, value in ranked] == sorted((value for _, value in ranked), reverse=True)
    assert sum(math.exp(value) for _, value in ranked) <= 1
    assert by.sample(request([1, 2], top_logprobs=top)) == drawn


# ---- which engine


def test_a_vocabulary_of_nothing_but_ends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"every token of the vocabulary \(5, 6\) ends the output"):
        runner(vocabulary=(5, 6), eos=(5,))
