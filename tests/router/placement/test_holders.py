"""Masks of slots by key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from router.placement import holders as module
from router.placement.holders import GONE_STEP, LOOKED_UP, MARK, Gone, Holders, slots_of


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


# ---- keys that nobody holds any more

CHAIN = [xxh3_64_intdigest(b"%d" % number) for number in range(10 * GONE_STEP)]


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, LOOKED_UP))
def test_the_beginning_of_a_prompt_that_was_held_once_is_told_from_new_text(old: int, new: int, every: int) -> None:
    """Some keys may have been forgotten for newer ones; all before one that is known were held, too."""
    gone = Gone()
    gone.add([*CHAIN[:old:every], *CHAIN[:old][-1:]])
    assert gone.leading(CHAIN[: old + new], 0) == (old, 0)


def test_only_the_last_holder_makes_a_key_gone() -> None:
    gone = Gone()
    holders = Holders(gone)
    for slot in (0, 1):
        holders.add(slot, CHAIN[:8])
    holders.discard(0, CHAIN[:8])
    assert gone.leading(CHAIN[:8], 0) == (0, 0)
    holders.discard(1, CHAIN[4:8])
    assert gone.leading(CHAIN[4:9], 0) == (4, 0)


def test_more_memory_keeps_what_went_last() -> None:
    gone = Gone()
    for first in range(0, len(CHAIN), GONE_STEP):
        gone.add(CHAIN[first : first + GONE_STEP])
    assert gone.leading(CHAIN[-3 * GONE_STEP :], 0) == (3 * GONE_STEP, 0)
    assert gone.leading(CHAIN, 4 * GONE_STEP) == (len(CHAIN), 4 * GONE_STEP)


def test_a_newer_key_takes_an_older_ones_place() -> None:
    gone = Gone()
    gone.add([*CHAIN, *(key ^ MARK for key in CHAIN)])
    assert gone.leading(CHAIN, 0) == (0, 0)
