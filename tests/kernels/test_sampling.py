"""Rows that are drawn together are drawn as each is in the engine's own sampler."""

import pytest
import torch
from torch import Tensor

from kernels.sampling import draw
from replica.cache.chain import Chain
from replica.messages import Sampling
from replica.runners import sampling
from replica.runners.request import Request
from tests.kernels.wishes import Wishes, broken, wishes


def drawn(asked: Wishes) -> list[int]:
    out = torch.full((len(asked.logits),), -1)
    draw(*asked, out)
    tokens: list[int] = out.tolist()
    return tokens


def one_by_one(asked: Wishes) -> list[int]:
    """As the engine's sampler has it; it draws at the places that the seeds say, so these are returned with it."""
    rows = range(len(asked.logits))
    return [token.token for token in sampling.sample(asked.logits, [request(asked, row) for row in rows])]


def request(asked: Wishes, row: int) -> Request:
    wanted = Sampling(
        max_tokens=1,
        temperature=float(asked.temperatures[row]),
        top_k=max(0, int(asked.top_ks[row])),
        top_p=min(1.0, float(asked.top_ps[row])),
        min_p=float(asked.min_ps[row]),
        seed=row,
    )
    return Request(0, Chain([0], 4, "model"), 1, wanted, (0.0, 0))


def at_the_seeds_places(asked: Wishes) -> Wishes:
    places = [sampling.uniform(row, 0) for row in range(len(asked.logits))]
    return asked._replace(wheres=torch.tensor(places, dtype=torch.float64))


@pytest.mark.parametrize("vocab", [1, 2, 33, 1000, 20011])
def test_a_row_draws_as_it_does_alone(vocab: int) -> None:
    asked = at_the_seeds_places(wishes(42, vocab, seed=vocab))
    assert drawn(asked) == one_by_one(asked)


def test_broken_rows_continue_with_their_likeliest_token() -> None:
    logits = broken(50)
    asked = at_the_seeds_places(wishes(len(logits), 50, seed=2)._replace(logits=logits))
    assert drawn(asked) == one_by_one(asked)


@pytest.mark.parametrize("where", [0.0, 0.5, 1 - 2.0**-53])
def test_nothing_of_weight_zero_is_drawn(where: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    assert drawn(wish(logits, where)) in ([1], [3])


def test_what_equals_the_last_that_is_kept_is_kept_too() -> None:
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    assert {drawn(wish(logits, where, top_k=2))[0] for where in (0.1, 0.5, 0.9)} == {0, 2, 3}
    assert {drawn(wish(logits, where, top_p=0.1))[0] for where in (0.1, 0.5, 0.9)} == {0, 2, 3}


def wish(logits: Tensor, where: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Wishes:
    numbers = torch.tensor([[temperature], [top_p], [0.0]])
    return Wishes(
        logits,
        numbers[0],
        torch.tensor([top_k], dtype=torch.int32),
        numbers[1],
        numbers[2],
        torch.tensor([where], dtype=torch.float64),
    )
