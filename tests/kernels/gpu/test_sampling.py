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


@pytest.mark.parametrize("vocab", [1, 33, 130, 401] if INTERPRETED else [1, 2, 33, 130, 1001])
def test_the_same_tokens_as_torch(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "LANES", 128)
    monkeypatch.setattr(sampling, "NOTED", 256)
    check(wishes(14, vocab, seed=vocab))


@pytest.mark.parametrize("vocab", [5003] if INTERPRETED else [5003, 32000, 128256, 151936, 152000 + 65])
def test_the_same_tokens_of_a_large_vocabulary(vocab: int) -> None:
    check(wishes(4 if INTERPRETED else 200, vocab, seed=vocab))


def test_more_tokens_than_are_noted_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "LANES", 64)
    monkeypatch.setattr(sampling, "NOTED", 64)
    asked = wishes(3, 200, seed=3)
    flat = asked._replace(logits=asked.logits / 10, top_ks=asked.top_ks.fill_(0), top_ps=asked.top_ps.fill_(0.9))
    check(flat)
    check(flat._replace(top_ks=flat.top_ks.fill_(100)))


def test_broken_rows_continue_with_their_likeliest_token() -> None:
    check(wishes(6, 50, seed=2)._replace(logits=broken(50)))


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
