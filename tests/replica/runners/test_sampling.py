"""Drawing tokens: what decides them, and which must never come."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from replica.cache.chain import Chain
from replica.messages import Sampling
from replica.runners import sampling
from replica.runners.request import Request
from replica.runners.runner import SampledToken
from replica.runners.sampling import CHUNK_LOGITS, pick, sample, shaped, token_logprobs, uniform
from replica.runners.simulated import SimulatedRunner
from tests.replica.engines import drain, engine, submit

NAN, INFINITY = math.nan, math.inf
SEEDS = range(3000)
# Chance exceeds these once in a million; the seeds are fixed, so it is once and for all.
CHI_SQUARE = {1: 24.0, 2: 27.6, 3: 30.7, 4: 33.4}


def request(prompt: Sequence[int] = (0,), output: Sequence[int] = (), **fields: Any) -> Request:
    sampling = Sampling(**({"max_tokens": 100} | fields))
    return Request(0, Chain([*prompt, *output], 4, "model"), len(prompt), sampling, (0.0, 0))


def token(logits: Sequence[float], prompt: Sequence[int] = (0,), output: Sequence[int] = (), **fields: Any) -> int:
    [drawn] = sample(torch.tensor([logits], dtype=torch.float32), [request(prompt, output, **fields)])
    return drawn.token


def tokens(logits: Sequence[float], **fields: Any) -> list[int]:
    """The tokens that many seeds draw."""
    rows = torch.tensor(logits).expand(len(SEEDS), -1)
    return [drawn.token for drawn in sample(rows, [request(seed=seed, **fields) for seed in SEEDS])]


# ---- the draw


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.8}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
        ({"logit_bias": {3: math.log(4), 0: math.log(0.25)}}, [0.1, 0.3, 0.2, 0.4]),
        ({"stop_token_ids": (1,), "min_tokens": 1}, [4 / 7, 0, 2 / 7, 1 / 7]),
        ({"repetition_penalty": 2.0, "temperature": 2.0}, None),
    ],
)
def test_tokens_come_as_often_as_they_should(fields: dict[str, Any], shares: list[float] | None) -> None:
    logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    if shares is None:  # the prompt holds token 0
        weights = [math.exp(logit * (2 if place == 0 else 1) / 2) for place, logit in enumerate(logits)]
        shares = [weight / sum(weights) for weight in weights]
    drawn = tokens(logits, **fields)
    likely = [place for place, share in enumerate(shares) if share]
    assert set(drawn) <= set(likely)
    expected = {place: shares[place] * len(SEEDS) for place in likely}
    chi_square = sum((drawn.count(place) - of_place) ** 2 / of_place for place, of_place in expected.items())
    assert chi_square < CHI_SQUARE[len(likely) - 1]


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = [0.0] * 1000
    here = token(logits, [1, 2, 3], [4, 5], seed=7)
    assert token(logits, [9], [8, 7], seed=7) == here
    assert token(logits, [9], [8, 7, 6], seed=7) != here
    assert token(logits, [9], [8, 7], seed=8) != here


def test_the_number_that_decides_is_the_same_for_ever() -> None:
    """Another replica, or another version, must continue with the same text."""
    assert uniform(0, 0) == 0.8150393007738989
    assert uniform(7, 3) == 0.24449979233815766
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert all(0 <= uniform(seed, 0) < 1 for seed in SEEDS)


@pytest.mark.parametrize("seed", [0, 1, 42, 12345])
def test_seeds_that_share_their_low_half_share_no_draw(seed: int) -> None:
    draws = {uniform(seed, position) for position in range(1000)}
    assert draws.isdisjoint(uniform(seed + (k << 32), position) for k in (1, 2, 1000) for position in range(1000))


def test_a_weight_that_vanishes_in_the_sum_is_not_picked_for_the_end() -> None:
    weights = torch.tensor([1, 1e-300, 1e-300], dtype=torch.float64)
    assert pick(weights, 1 - 2**-53) == 0


# ---- what is left to draw from


@pytest.mark.parametrize("vocab", [1023, 1025, 30_000])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999999])
def test_a_nucleus_of_any_size_ends_where_a_full_sort_says(vocab: int, top_p: float) -> None:
    weights = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64).exp()
    in_order = sorted(weights.tolist(), reverse=True)
    have, end = 0.0, 0
    while have < top_p * float(weights.sum()):
        have, end = have + in_order[end], end + 1
    assert float(sampling._nucleus_end(weights, top_p)) == in_order[end - 1]


def test_no_temperature_and_no_penalty_makes_an_infinity() -> None:
    logits = [3e38, -3e38, 1.0, 0.0]
    assert token(logits, temperature=1e-5) == 0
    assert token(logits, temperature=1e300) in range(4)
    for penalty in (1e-300, 1e300):
        assert token([1.0, -1.0, 0.0, 0.5], [0, 1, 2, 3], repetition_penalty=penalty) in range(4)


# ---- what the client adds


def test_where_every_token_would_end_the_output_too_early_the_likeliest_comes() -> None:
    assert token([0.0, 9.0], stop_token_ids=(0, 1), min_tokens=3) == 1


# ---- through the engine


class Repeating(SimulatedRunner):
    """A model that always computes the same logits; only the samples differ."""

    def sample(self, request: Request) -> SampledToken:
        return sample(torch.tensor([[2.0, 1.9, 1.8, 1.7, 1.6, 1.5]]), [request])[0]


PENALIZED: dict[str, Any] = {"frequency_penalty": 0.3, "repetition_penalty": 1.1, "presence_penalty": 0.1}


def test_penalties_survive_preemption() -> None:
    alone = engine(runner=Repeating)
    submit(alone, 0, [0, 1, 2], 30, seed=5, **PENALIZED)
    small = engine(runner=Repeating, num_blocks=10)
    for number in range(3):
        submit(small, number, [0, 1, 2], 30, seed=5, **PENALIZED)
    expected = drain(alone)[0]
    assert drain(small) == dict.fromkeys(range(3), expected)
    assert small.scheduler.preemptions > 0


def test_rows_are_shaped_together_as_each_alone() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * 5
    logits[4] = -math.inf
    requests = [
        request([1, 2, 3], [4, 4, 39], **PENALIZED),
        request(logit_bias={0: 3.5, 39: -100.0, 40: 7.0}),
        request(stop_token_ids=(0, 39, 40), min_tokens=9),
        request([7], [7, 8], repetition_penalty=1e-50, frequency_penalty=-2.0, logit_bias={7: -1.0}),
        request([5, 6], [6], stop_token_ids=(6,), min_tokens=2, presence_penalty=1.0),
    ]
    generated = [one.generated for one in requests]
    together = shaped(logits, requests, generated)
    for row, one in enumerate(requests):
        assert torch.equal(together[row], shaped(logits[row : row + 1], [one], generated[row : row + 1])[0])
        assert not torch.equal(together[row], logits[row]) or row == 4
    assert shaped(logits[:1], [request()], [0]).equal(logits[:1])


# ---- log probabilities


def logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[tuple[int, list[int]]]:
    """Ranks, and the ids of the alternatives."""
    return [(found.rank, [token for token, _ in found.top]) for found in token_logprobs(logits, token_ids, top)]


def test_equally_likely_alternatives_are_told_by_their_ids() -> None:
    rows = torch.tensor([[1.0, 2, 2, 3, 2, 2], [0, 0, 0, 0, 0, 0]])
    assert logprobs(rows, [4, 5], 3) == [(2, [3, 1, 2]), (1, [0, 1, 2])]
    assert logprobs(rows, [0, 0], 20) == [(6, [3, 1, 2, 4, 5, 0]), (1, [0, 1, 2, 3, 4, 5])]
    assert logprobs(rows, [0, 0], 0) == [(6, []), (1, [])]
    wide = torch.zeros(1, 5000)
    wide[0, 4000] = 1
    assert logprobs(wide, [9], 4) == [(2, [4000, 0, 1, 2])]


def test_a_long_prompt_is_looked_at_in_pieces() -> None:
    vocab = CHUNK_LOGITS // 2
    rows = torch.zeros(3, vocab, dtype=torch.bfloat16)
    rows[torch.arange(3), torch.tensor([5, 6, 7])] = 1
    assert logprobs(rows, [5, 5, 7], 1) == [(1, [5]), (2, [6]), (1, [7])]


# ---- a model that fails


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ([NAN, 1.0, 2.0, 0.0], 2),
        ([0.0, INFINITY, 9.0, INFINITY], 1),
        ([-INFINITY] * 4, 0),
        ([NAN] * 4, 0),
    ],
)
def test_logits_that_are_no_numbers_harm_only_their_own_request(broken: list[float], expected: int) -> None:
    fine = [0.0, -INFINITY, 2.0, 1.0]
    requests = [request(top_logprobs=4, seed=5, top_p=0.9), request(top_logprobs=4, seed=6, temperature=0.7)]
    [harmed, other] = sample(torch.tensor([broken, fine]), requests)
    assert harmed.token == expected
    assert harmed.logprobs is not None and not math.isnan(harmed.logprobs.logprob)
    assert [other] == sample(torch.tensor([fine]), requests[1:])


def test_a_model_that_fails_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sampling._tell_of_broken.cache_clear()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            token([NAN, 1.0], top_logprobs=1)
    [record] = caplog.records
    assert "non-finite" in record.message
