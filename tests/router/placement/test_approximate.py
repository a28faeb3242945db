"""Prompts that were sent to replicas without events, against a list of blocks, the next to be forgotten first."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from router.placement.index import Approximate, PrefixIndex

CAPACITY = 5
CHAINS = st.lists(st.integers(0, 2), max_size=7).map(
    lambda turns: [hash(tuple(turns[: end + 1])) & 2**64 - 1 for end in range(len(turns))]
)


@given(routed=st.lists(st.tuples(st.integers(0, 2), CHAINS | st.none()), max_size=40))
def test_the_index_holds_what_a_list_holds(routed: list[tuple[int, list[int] | None]]) -> None:
    index = PrefixIndex()
    slots = [index.add() for _ in range(3)]
    approximate = Approximate(index, CAPACITY)
    model: dict[int, list[int]] = {slot: [] for slot in slots}
    for slot, keys in routed:
        if keys is None:
            approximate.clear(slot)
            index.clear(slot)
            model[slot].clear()
            continue
        approximate.routed(slot, keys)
        kept = keys[:CAPACITY]
        model[slot] = [*(key for key in model[slot] if key not in kept), *reversed(kept)][-CAPACITY:]
        approximate.check()
        index.check()
        for one in slots:
            for _, chain in routed:
                expected = 0
                while expected < len(chain or []) and (chain or [])[expected] in model[one]:
                    expected += 1
                assert index.match(chain or [], 1 << one).gpu.get(one, 0) == expected


def test_prompts_of_peers_count_once_they_are_asked_for_and_go_with_their_replica() -> None:
    index = PrefixIndex()
    slots = [index.add() for _ in range(2)]
    approximate = Approximate(index, CAPACITY)
    for number in range(0, 100, 2):
        approximate.heard(slots[number % 4 // 2], array("Q", [number, number + 1]).tobytes())
        approximate.check()
    assert 0 < 2 * len(approximate.unread) <= CAPACITY, "the oldest are forgotten"
    newest = next(reversed(approximate.unread))
    assert not index.match([newest, newest + 1], 0b11).gpu
    approximate.read(newest)
    assert index.match([newest, newest + 1], 0b11).gpu == {slots[1]: 2}
    for slot in slots:
        approximate.clear(slot)
        approximate.check()
    assert not approximate.unread and not index.match([newest], 0b11).gpu
