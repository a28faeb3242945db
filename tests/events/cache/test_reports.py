"""Reports of resident blocks, told from second copies."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.blocks import block_keys, root_key
from events.cache.resolver import Resolver
from events.cache.slices import slices
from events.messages import BlockRemoved, BlockStored, Event

MODEL = "m"
SIZE = 2
TOKENS = list(range(40))
KEYS = block_keys(TOKENS, SIZE, root_key(MODEL, block_size=SIZE))
HASHES = list(range(101, 121))


def stored(first: int, end: int) -> BlockStored:
    """Some blocks of the one text."""
    parent = HASHES[first - 1] if first else None
    return BlockStored([*HASHES[first:end]], parent, TOKENS[first * SIZE : end * SIZE], SIZE, None, "GPU", None)


def removed(*blocks: int) -> BlockRemoved:
    return BlockRemoved([HASHES[block] for block in blocks], "GPU")


def held(*batches: Sequence[Event], gpu_blocks: int | None = None) -> Resolver:
    resolver = Resolver(MODEL)
    resolver.capacity.limit(gpu_blocks)
    for batch in batches:
        resolver.apply(batch)
        resolver.check()
    return resolver


def test_report_that_new_blocks_follow_is_no_copy() -> None:
    resolver = held([stored(0, 3)], [stored(0, 3), stored(3, 5)], [removed(2)])
    assert (resolver.keys(), resolver.inexact) == ({*KEYS[:2], *KEYS[3:5]}, None)


def test_report_may_follow_evictions_for_the_new_blocks() -> None:
    resolver = held([stored(0, 6)], [stored(0, 3), removed(5, 4), stored(3, 5)], [removed(2)])
    assert resolver.keys() == {*KEYS[:2], *KEYS[3:5]}


def test_blocks_computed_twice_are_two_copies() -> None:
    resolver = held([stored(0, 3)], [stored(0, 3)], [removed(2)])
    assert (resolver.keys(), resolver.inexact) == (set(KEYS[:3]), None)
    resolver.apply([removed(2)])
    assert resolver.keys() == set(KEYS[:2])


def test_next_chunk_of_a_prompt_computed_twice_comes_in_another_batch() -> None:
    resolver = held([stored(0, 3)], [stored(0, 3)], [stored(3, 5)], [removed(2)])
    assert resolver.keys() == set(KEYS[:5])


def test_earlier_reports_are_taken_back_by_the_first_that_tells() -> None:
    resolver = held([stored(0, 3)], [stored(0, 3)], [stored(0, 2)], [removed(2)], [stored(0, 2), stored(2, 4)])
    assert resolver.keys() == set(KEYS[:4])
    resolver.apply([removed(0)])
    assert resolver.keys() == set(KEYS[1:4])


def test_block_that_only_a_report_kept_goes_with_the_first_that_tells() -> None:
    resolver = held([stored(0, 3)], [stored(0, 3)], [removed(2)])
    assert resolver.keys() == set(KEYS[:3]), "it may have been a copy"
    resolver.apply([stored(0, 1), stored(1, 2)])
    assert resolver.keys() == set(KEYS[:2])


def test_more_copies_than_the_pool_has_room_for_are_reports() -> None:
    batches: list[list[Event]] = [[stored(0, 3)] for _ in range(5)]
    resolver = held(*batches, gpu_blocks=10)
    resolver.apply([removed(2)])
    assert resolver.keys() == set(KEYS[:2])


def test_second_copy_that_was_taken_for_a_report_is_noticed_when_it_goes() -> None:
    resolver = held([stored(0, 3)], [stored(0, 3), stored(3, 4)], [stored(0, 3)], [removed(2)])
    assert resolver.inexact is None
    resolver.apply([removed(2)])
    assert resolver.inexact == "a block was removed twice whose second store was taken for a report of the first"


def test_another_process_may_not_be_asked_for_reports() -> None:
    resolver = held([stored(0, 3)], [stored(0, 2), stored(2, 4)])
    resolver.restarted()
    resolver.reset()
    for batch in ([stored(0, 3)], [stored(0, 3)], [removed(2)]):
        resolver.apply(batch)
    assert resolver.keys() == set(KEYS[:3])


def test_report_in_slices_is_one_too() -> None:
    resolver = held([stored(0, 12)], [stored(0, 2), stored(2, 3)])
    for part in slices([stored(0, 12)], 4):
        resolver.apply(part)
    resolver.apply([removed(*range(4, 12))])
    assert resolver.keys() == set(KEYS[:4])


@pytest.mark.parametrize("asks", [True, False])
@given(seed=st.integers(0, 2**32))
def test_resident_blocks_are_those_of_the_engine(asks: bool, seed: int) -> None:
    """Requests of one text, some of which ask for reports, or compute everything again, but not both on one engine."""
    chance, resolver, truth = random.Random(seed), Resolver(MODEL), Counter[int]()
    told = False
    for _ in range(30):
        batch: list[Event] = []
        end = chance.randrange(1, 20)
        hit = next((block for block in range(end) if not truth[block]), end)
        if asks and hit:
            batch.append(stored(0, hit))
        elif not asks and chance.random() < 0.3:
            hit = 0
        if chance.random() < 0.5 and (gone := [block for block, copies in truth.items() if copies and block >= hit]):
            batch.append(removed(*gone[:3]))
            truth.subtract(gone[:3])
        if hit < end:
            told = told or bool(hit)
            batch.append(stored(hit, end))
            truth.update(range(hit, end))
        resolver.apply(batch)
        resolver.check()
        if told or not asks:
            assert resolver.keys() == {KEYS[block] for block, copies in truth.items() if copies}
            assert resolver.inexact is None
