"""Collectives of ranks, here threads: what they compute, in which order, and that a lost rank is noticed."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from replica.parallel import memory
from replica.parallel.group import BUFFER_BYTES, Group, RankLostError, connected, memory_size
from replica.parallel.shares import Share

Result = TypeVar("Result")
RANKS = 3


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    descriptor = memory.create(memory_size(RANKS))
    made = [Group(Share(rank, RANKS), descriptor, peers) for rank, peers in enumerate(connected(RANKS))]
    os.close(descriptor)
    yield made
    for group in made:
        group.close()


def on_all(groups: list[Group], call: Callable[[Group, int], Result]) -> list[Result]:
    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(call, groups, range(RANKS)))


def parts(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A tensor for each rank."""
    return list((torch.randn(RANKS, *shape, generator=torch.Generator().manual_seed(1)) * 10).to(dtype))


SHAPES = [(1, 7), (16, 64), (BUFFER_BYTES // 4 + 3, 3)]  # the last one goes in pieces


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_in_the_order_of_ranks(groups: list[Group], shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = parts(*shape, dtype=dtype)
    first, second, third = given
    expected = (first + second) + third
    for _ in range(3):
        for found in on_all(groups, lambda group, rank: group.sum(given[rank].clone())):
            assert torch.equal(found, expected)


def test_rows_of_a_transposed_tensor_are_summed_too(groups: list[Group]) -> None:
    given = parts(5, 6)
    for found in on_all(groups, lambda group, rank: group.sum(given[rank].clone().t())):
        assert torch.equal(found, ((given[0] + given[1]) + given[2]).t())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_rank_gathers_all_parts(groups: list[Group], shape: tuple[int, int]) -> None:
    given = parts(*shape)
    leader, *others = on_all(groups, lambda group, rank: group.gather(given[rank]))
    assert all(torch.equal(found, expected) for found, expected in zip(leader, given, strict=True))
    assert others == [[], []]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_ranks_rows_reach_the_others(groups: list[Group], shape: tuple[int, int]) -> None:
    given = parts(*shape)
    for found in on_all(groups, lambda group, rank: group.broadcast(given[rank].clone())):
        assert torch.equal(found, given[0])


def test_a_lost_rank_is_noticed(groups: list[Group]) -> None:
    groups[2].close()
    for group in groups[:2]:
        with pytest.raises(RankLostError):
            group.sum(torch.ones(1))
