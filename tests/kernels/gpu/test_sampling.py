"""Triton draws what torch draws, however many tokens a client leaves to draw from."""

import pytest

pytest.importorskip("triton", reason="there is no Triton here: see `make triton-check`")

import torch

from kernels import sampling as plain
from kernels.gpu import sampling
from tests.kernels.gpu.device import DEVICE, INTERPRETED, needs_device
from tests.kernels.wishes import Wishes, broken, wishes

pytestmark = needs_device


def check(asked: Wishes) -> None:
    mine, expected = torch.full((2, len(asked.logits)), -1, device=DEVICE)
    there = Wishes(*(part.to(DEVICE) for part in asked))
    sampling.draw(*there, mine)
    plain.draw(*there, expected)
    assert mine.tolist() == expected.tolist()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks in a short row, and little room."""
    for name, size in {"CHUNK": 64, "GROUP": 8, "LANES": 64, "NOTED": 64}.items():
        monkeypatch.setattr(sampling, name, size)


@pytest.mark.parametrize("vocab", [1, 33, 64, 130, 401] if INTERPRETED else [1, 2, 33, 64, 130, 1001])
@pytest.mark.usefixtures("small")
def test_the_same_tokens_as_torch(vocab: int) -> None:
    check(wishes(14, vocab, seed=vocab))


@pytest.mark.parametrize("vocab", [5003] if INTERPRETED else [5003, 32000, 128256, 151936, 152000 + 65])
def test_the_same_tokens_of_a_large_vocabulary(vocab: int) -> None:
    check(wishes(4 if INTERPRETED else 200, vocab, seed=vocab))


@pytest.mark.usefixtures("small")
def test_more_tokens_than_are_noted_are_left() -> None:
    asked = wishes(3, 200, seed=3)
    flat = asked._replace(logits=asked.logits / 10, top_ks=asked.top_ks.fill_(0), top_ps=asked.top_ps.fill_(0.9))
    check(flat)
    check(flat._replace(top_ps=flat.top_ps.fill_(1.0), min_ps=flat.min_ps.fill_(0.4)))
    check(flat._replace(top_ks=flat.top_ks.fill_(100)))


@pytest.mark.usefixtures("small")
def test_chunks_in_which_nothing_may_be_drawn() -> None:
    """As a grammar leaves them."""
    asked = wishes(14, 401, seed=6)
    ruled_out = torch.arange(401) // 100 % 2 == torch.arange(14)[:, None] % 2
    check(asked._replace(logits=asked.logits.masked_fill(ruled_out, -torch.inf)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0 - 2**-53])
def test_the_first_and_the_last_that_may_be_drawn(where: float) -> None:
    asked = wishes(14, 200, seed=7)
    check(asked._replace(wheres=torch.full((14,), where, dtype=torch.float64)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("vocab", [50, 150])
def test_broken_rows_continue_with_their_likeliest_token(vocab: int) -> None:
    check(wishes(6, vocab, seed=2)._replace(logits=broken(vocab)))


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's work can be counted")
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (20, 1.0), (20, 0.9)])
@pytest.mark.parametrize("rest", [-20.0, -torch.inf], ids=["neighbours", "a grammar's"])
def test_few_likely_neighbours_do_not_have_the_whole_row_searched(
    rest: float, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As digits are, which have neighbouring numbers."""
    asked = wishes(1, 50_000, seed=8)
    likely = (torch.arange(50_000) >= 15) & (torch.arange(50_000) < 25)
    logits = torch.where(likely, 0.0, rest) + asked.logits
    weigh, blocks = sampling.weights_of, 0

    def counted(*arguments: object) -> object:
        nonlocal blocks
        blocks += 1
        return weigh(*arguments)

    monkeypatch.setattr(sampling, "weights_of", counted)
    shape = {"top_ks": torch.tensor([top_k]).int(), "top_ps": torch.tensor([top_p]), "min_ps": torch.zeros(1)}
    check(asked._replace(logits=logits, temperatures=torch.ones(1), **shape))
    assert blocks < 150


def test_rows_of_a_wider_matrix() -> None:
    asked = wishes(3, 70, seed=4)
    wide = torch.full((3, 100), torch.inf)
    wide[:, :70] = asked.logits
    check(asked._replace(logits=wide.to(DEVICE)[:, :70]))


def test_both_zeros_are_equal() -> None:
    asked = wishes(1, 3, seed=5)._replace(logits=torch.tensor([[0.0, -0.0, -1.0]]), top_ks=torch.tensor([1]).int())
    unbounded = asked._replace(temperatures=torch.ones(1), top_ps=torch.ones(1), min_ps=torch.zeros(1))
    for where in (0.1, 0.9):
        check(unbounded._replace(wheres=torch.tensor([where], dtype=torch.float64)))
