"""The sampler against a few lines of plain Python, and a row against itself in another batch."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.cache.chain import Chain
from replica.messages import Sampling
from replica.runners.request import Request
from replica.runners.sampling import sample, token_logprobs, uniform

VOCAB = 8
NUDGE = 1e-12  # where sums that are rounded in another order may decide otherwise
IMPOSSIBLE = -math.inf

# Quarters and powers of two, so that float32 computes exactly what Python does; and small, so that there are ties.
quarters = st.integers(-16, 16).map(lambda number: number / 4)
some_logits = st.lists(quarters | st.just(IMPOSSIBLE), min_size=VOCAB, max_size=VOCAB).filter(
    lambda logits: max(logits) > IMPOSSIBLE
)
some_tokens = st.integers(0, VOCAB - 1)
PARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1e-6, 0.01, 0.5, 0.7, 1.0, 2.0, 30.0]),
    "top_p": st.floats(0, 1, exclude_min=True) | st.sampled_from([0.5, 0.9, 1.0]),
    "top_k": st.integers(0, VOCAB + 1),
    "min_p": st.floats(0, 1) | st.sampled_from([0.05, 1.0]),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    "presence_penalty": st.integers(-8, 8).map(lambda number: number / 4),
    "frequency_penalty": st.integers(-8, 8).map(lambda number: number / 4),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB + 1), quarters, max_size=3),
    "min_tokens": st.integers(0, 4),
}
stops = st.lists(st.integers(0, VOCAB + 1), max_size=3, unique=True).map(tuple)
mixed = st.fixed_dictionaries({}, optional=PARAMETERS)
seeds = st.integers(-(2**63), 2**63 - 1)


def request(prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> Request:
    return Request(0, Chain([*prompt, *output], 4, "model"), len(prompt), sampling, (0.0, 0))


def shaped(logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> list[float]:
    """The logits with what the client adds."""
    result = []
    for token, given_logit in enumerate(logits):
        logit = given_logit + sampling.logit_bias.get(token, 0)
        if token in sampling.stop_token_ids and len(output) < sampling.min_tokens:
            logit = IMPOSSIBLE
        if token in prompt or token in output:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty * (token in output)
        result.append(logit)
    return result


def kept(logits: Sequence[float], sampling: Sampling, top_p: float, min_p: float) -> list[float]:
    """Each token's weight, 0 for excluded tokens."""
    peak = max(logits)
    weights = [math.exp((logit - peak) / sampling.temperature) for logit in logits]
    weights = [weight if weight >= min_p else 0.0 for weight in weights]
    if sampling.top_k:
        last = sorted(weights, reverse=True)[: sampling.top_k][-1]
        weights = [weight if weight >= last else 0.0 for weight in weights]
    have, whole = 0.0, sum(weights)
    for weight in sorted(weights, reverse=True):
        have += weight
        if have >= top_p * whole:
            return [other if other >= weight else 0.0 for other in weights]
    return weights


def expected(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], sampling: Sampling, nudges: Sequence[float]
) -> int:
    logits_now = shaped(logits, prompt, output, sampling)
    if max(logits_now) == IMPOSSIBLE:
        return logits.index(max(logits))
    if sampling.temperature < 1e-5:
        return logits_now.index(max(logits_now))
    weights = kept(logits_now, sampling, sampling.top_p + nudges[0], min(1.0, sampling.min_p * (1 + nudges[1])))
    where = uniform(sampling.seed, len(output)) + nudges[2]
    sums = list(itertools.accumulate(weights))
    beyond = [token for token in range(VOCAB) if sums[token] > where * sums[-1]]
    return beyond[0] if beyond else max(token for token in range(VOCAB) if weights[token])


def check(logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> None:
    [drawn] = sample(torch.tensor([logits]), [request(prompt, output, sampling)])
    arguments = (logits, prompt, output, sampling)
    if drawn.token != expected(*arguments, (0, 0, 0)):
        assert drawn.token in {
            expected(*arguments, nudges) for nudges in itertools.product((-NUDGE, 0, NUDGE), repeat=3)
        }


histories = st.tuples(st.lists(some_tokens, min_size=1, max_size=6), st.lists(some_tokens, max_size=6))


@pytest.mark.parametrize("name", PARAMETERS)
@given(data=st.data(), logits=some_logits, history=histories, seed=seeds, stop=stops)
def test_each_parameter_means_what_it_says(
    name: str, data: st.DataObject, logits: list[float], history: tuple[list[int], list[int]], seed: int, stop: Any
) -> None:
    fields = {name: data.draw(PARAMETERS[name])}
    check(logits, *history, Sampling(max_tokens=10, seed=seed, stop_token_ids=stop, **fields))


@given(logits=some_logits, history=histories, seed=seeds, stop=stops, fields=mixed)
def test_all_parameters_together_mean_what_they_say(
    logits: list[float], history: tuple[list[int], list[int]], seed: int, stop: Any, fields: dict[str, Any]
) -> None:
    check(logits, *history, Sampling(max_tokens=10, seed=seed, stop_token_ids=stop, **fields))


@given(
    rows=st.lists(st.tuples(seeds, mixed, histories, st.none() | st.integers(0, 20)), min_size=2, max_size=6),
    vocab=st.integers(VOCAB + 2, 3000),
    noise=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_a_row_is_the_same_to_the_last_bit_in_any_company(
    rows: list[Any], vocab: int, noise: int, spread: float
) -> None:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(noise)) * spread
    samplings = [Sampling(max_tokens=10, seed=seed, top_logprobs=top, **fields) for seed, fields, _, top in rows]

    def requests() -> list[Request]:
        histories = [history for _, _, history, _ in rows]
        return [
            request(prompt, output, sampling) for (prompt, output), sampling in zip(histories, samplings, strict=True)
        ]

    together = sample(logits, requests())
    assert together == [sample(logits[place : place + 1], [alone])[0] for place, alone in enumerate(requests())]
    assert together[::-1] == sample(logits.flip(0), requests()[::-1])


@given(
    logits=st.lists(some_logits, min_size=1, max_size=4),
    tokens=st.lists(some_tokens, min_size=4, max_size=4),
    top=st.integers(0, 20),
)
def test_logprobs_are_what_a_list_that_is_sorted_says(logits: list[list[float]], tokens: list[int], top: int) -> None:
    found = token_logprobs(torch.tensor(logits), tokens[: len(logits)], top)
    for row, token, of_token in zip(logits, tokens, found, strict=False):
        whole = math.log(sum(map(math.exp, row)))
        assert of_token.logprob == pytest.approx(row[token] - whole)
        assert of_token.rank == 1 + sum(other > row[token] for other in row)
        ranked = sorted(range(VOCAB), key=lambda other: (-row[other], other))[:top]
        assert [alternative for alternative, _ in of_token.top] == ranked
        assert [value for _, value in of_token.top] == [pytest.approx(row[other] - whole) for other in ranked]


@given(
    history=histories,
    fields=mixed,
    seed=seeds,
    noise=st.integers(0, 2**32),
    lost=st.sets(st.integers(0, 11)),
)
def test_what_is_kept_of_a_request_changes_nothing(
    history: tuple[list[int], list[int]], fields: dict[str, Any], seed: int, noise: int, lost: set[int]
) -> None:
    """State that grows, state that is lost at some steps, and no state at all give the same output."""
    generator = torch.Generator().manual_seed(noise)
    sampling = Sampling(max_tokens=20, seed=seed, **fields)
    kept_all, kept_some = request(*history, sampling), request(*history, sampling)
    for step in range(12):
        if step in lost:
            kept_some.runner_state = None
        logits = torch.randn(1, VOCAB, generator=generator) * 2
        fresh = request(history[0], kept_all.chain.tokens[len(history[0]) :], sampling)
        [drawn] = sample(logits, [fresh])
        assert sample(logits, [kept_all]) == sample(logits, [kept_some]) == [drawn]
        kept_all.chain.append(drawn.token)
        kept_some.chain.append(drawn.token)
