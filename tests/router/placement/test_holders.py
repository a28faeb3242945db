"""Masks of slots by key."""

import pytest

from router.placement import holders as module
from router.placement.holders import Holders, slots_of


def test_add_and_discard_say_how_many_keys_changed_hands() -> None:
    holders = Holders()
    assert (holders.add(0, [1, 2, 3]), holders.add(0, [3, 4, 4]), holders.add(5, [3, 3])) == (3, 1, 1)
    assert holders.masks == {1: 1, 2: 1, 3: 0b100001, 4: 1}
    assert (holders.discard(0, [3, 3, 9]), holders.discard(5, [1]), holders.discard(5, [3])) == (1, 0, 1)
    assert holders.masks == {1: 1, 2: 1, 4: 1}
    assert (holders.of(0), holders.counts()) == ([1, 2, 4], {0: 3})


def test_equal_masks_are_one_object_however_they_came_about() -> None:
    holders = Holders()
    holders.add(500, [1, 2])
    holders.add(300, [1])
    holders.add(300, [2, 3])
    holders.add(500, [3])
    assert len({id(mask) for mask in holders.masks.values()}) == 1
    holders.discard(300, [2])
    holders.add(500, [4])
    assert holders.masks[2] is holders.masks[4]


def test_the_table_of_shared_masks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARED_MASKS", 16)
    holders = Holders()
    for slot in range(100):
        holders.add(slot, [1, 2])
        assert len(holders._shared) <= 16
    assert holders.masks == {1: (1 << 100) - 1, 2: (1 << 100) - 1}


def test_slots_of_a_mask_come_in_order() -> None:
    assert (slots_of(0), slots_of(0b1101), slots_of(1 << 700 | 2)) == ((), (0, 2, 3), (1, 700))


def test_interned_keys_go_with_their_last_holder() -> None:
    holders = Holders()
    holders.add(0, [1, 2])
    holders.add(1, holders.intern([1, 2, 3]))
    holders.discard(0, [1, 2])
    assert holders._objects == {1: 1, 2: 2, 3: 3}
    holders.discard(1, [1, 2, 3])
    assert holders._objects == {}


def test_interned_keys_that_are_never_added_are_not_kept_for_ever() -> None:
    holders = Holders()
    holders.add(0, [0, 1])
    for key in range(2, 1000):
        holders.intern([0, key])
        assert len(holders._objects) <= 4
