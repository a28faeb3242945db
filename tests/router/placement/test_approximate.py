import tracemalloc
from itertools import count

from router.placement.index import Approximate, PrefixIndex


def held(index: PrefixIndex, slot: int, keys: list[int]) -> int:
    return index.match(keys, 1 << slot).gpu.get(slot, 0)


def test_what_was_routed_is_matched_there_and_nowhere_else() -> None:
    index = PrefixIndex()
    one, other = index.add(), index.add()
    routed = Approximate(index, 100)
    routed.routed(one, [1, 2, 3])
    assert index.match([1, 2, 3, 4], 0b11).gpu == {one: 3}
    routed.routed(other, [1, 2, 9])
    assert index.match([1, 2, 3, 4], 0b11).gpu == {one: 3, other: 2}
    routed.check()


def test_the_end_of_the_oldest_prompt_is_forgotten_first() -> None:
    index = PrefixIndex()
    slot = index.add()
    routed = Approximate(index, 6)
    routed.routed(slot, [1, 2, 3, 4])
    routed.routed(slot, [11, 12, 13, 14])
    assert (held(index, slot, [1, 2, 3, 4]), held(index, slot, [11, 12, 13, 14])) == (2, 4)
    routed.routed(slot, [1, 2])  # used again: now the other one is the oldest
    routed.routed(slot, [21, 22])
    assert (held(index, slot, [1, 2, 3, 4]), held(index, slot, [11, 12, 13, 14])) == (2, 2)
    routed.check()


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    index = PrefixIndex()
    slot = index.add()
    routed = Approximate(index, 4)
    routed.routed(slot, range(10))
    assert held(index, slot, list(range(10))) == 4
    assert routed.blocks(slot) == 4
    routed.check()


def test_a_dropped_replica_is_forgotten() -> None:
    index = PrefixIndex()
    slot = index.add()
    routed = Approximate(index, 4)
    routed.routed(slot, [1, 2])
    routed.clear(slot)
    index.drop(slot)
    assert index.add() == slot and routed.blocks(slot) == 0
    routed.check()
    routed.routed(slot, [1, 2])
    assert held(index, slot, [1, 2]) == 2


def test_memory_is_flat_under_churn() -> None:
    index = PrefixIndex()
    slot = index.add()
    routed = Approximate(index, 1000)
    fresh = count()

    def churn(prompts: int) -> int:
        for _ in range(prompts):
            routed.routed(slot, [next(fresh) for _ in range(50)])
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = churn(200)
        after = churn(1000)
    finally:
        tracemalloc.stop()
    routed.check()
    index.check()
    assert after < before * 1.5
