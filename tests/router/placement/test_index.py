"""All replicas in one structure."""

import pytest

from events.cache.changes import Cleared, Grouped, Held, Removed, Stored
from events.cache.groups import Group, Layout
from events.messages import BlockStored
from router.placement.index import Matches, PrefixIndex

KEYS = list(range(100, 110))
EVENT = BlockStored([], None, [], 4, None, "GPU", None)


def stored(keys: list[int], medium: str = "GPU", chain: list[int] | None = None) -> Stored:
    event = BlockStored(list(keys), None, [], 4, None, medium, None)
    return Stored(medium, keys, chain or keys, 0, event)


def holding(*lengths: int) -> PrefixIndex:
    index = PrefixIndex()
    for length in lengths:
        index.store(index.add(), KEYS[:length])
    index.check()
    return index


# ---- one walk


def test_700_replicas_may_hold_one_block() -> None:
    index = holding(*[1 + slot % 10 for slot in range(700)])
    assert index.match(KEYS, (1 << 700) - 1).gpu == {slot: 1 + slot % 10 for slot in range(700)}
    assert index.match(KEYS, 1 << 699).gpu == {699: 10}


# ---- media


def test_holders_of_blocks_are_told_in_any_medium_and_behind_gaps() -> None:
    index = holding(2, 4)
    index.store(0, [KEYS[3]], "CPU")
    assert index.holders([*KEYS[:5], 999]) == [0b11, 0b11, 0b10, 0b11, 0, 0]
    assert index.holders([]) == []


def test_an_unused_medium_costs_nothing() -> None:
    index = holding(4)
    index.store(0, KEYS[4:6], "CPU")
    index.remove(0, KEYS[4:6], "CPU")
    index.remove(0, KEYS[4:6], "TAPE")
    matches = index.match(KEYS, 1)
    assert matches.lower is matches.gpu
    assert (index.blocks(0), list(index.pools)) == ({"GPU": 4}, [("GPU", 0)])
    index.check()


# ---- optimistic entries


def test_stored_confirms_whatever_of_the_chain_was_awaited() -> None:
    index = holding(0)
    index.optimistic.add(0, KEYS[:4], 1.0)
    index.apply(0, stored([KEYS[1]], chain=KEYS[:2]))
    assert sorted(index.optimistic.holders.masks) == KEYS[2:4]
    index.apply(0, stored(KEYS[2:4], "CPU"))  # the GPU's copy may still come
    assert sorted(index.optimistic.holders.masks) == KEYS[2:4]
    index.optimistic.check()


# ---- changes


def test_cleared_without_the_keys_finds_them_anyway() -> None:
    index = holding(5, 5)
    index.apply(0, stored([1, 2], "CPU"))
    index.apply(0, stored([7, 8]))
    index.apply(0, Cleared())
    index.check()
    assert (index.blocks(0), index.blocks(1)) == ({}, {"GPU": 5})


def test_a_replica_leaves_without_a_look_at_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    index = holding(5, 5)
    index.apply(1, stored([1, 2], "CPU"))

    def scan(*_: object) -> list[int]:
        raise AssertionError("the whole index was searched")

    monkeypatch.setattr("router.placement.holders.Holders.of", scan)
    for slot in (0, 1):
        index.apply(slot, Cleared((Held("GPU", 0, set(KEYS[:5])), *([Held("CPU", 0, {1, 2})] if slot else []))))
        index.drop(slot)
    index.store(index.add(), KEYS)
    index.apply(0, stored([1]))
    with pytest.raises(AssertionError, match="was searched"):  # nobody has said what it held
        index.drop(0)


def test_check_finds_a_count_that_drifted() -> None:
    index = holding(5)
    index.pools["GPU", 0].masks[1] = 1
    with pytest.raises(AssertionError, match="6"):
        index.check()


# ---- memory


def test_replicas_that_hold_the_same_blocks_keep_one_object_for_each_key() -> None:
    index = holding(0, 0, 0, 0)
    kept = []
    for slot in range(4):
        keys = index.intern([2**60 + key for key in range(10)])
        assert keys == [2**60 + key for key in range(10)]
        index.store(slot, keys)
        kept.append([id(key) for key in keys])
    assert kept[1] == kept[2] == kept[3]


def test_churn_leaves_nothing_behind() -> None:
    index = holding(0, 0)
    for first in range(0, 60_000, 60):
        index.store(0, range(first, first + 60))
        index.store(1, range(first, first + 30), "CPU")
        if first >= 600:
            index.remove(0, range(first - 600, first - 540))
            index.remove(1, range(first - 600, first - 570), "CPU")
        if first == 6000:
            used = index.bytes_used()
    index.check()
    assert index.bytes_used() <= used
    assert index.blocks(0) == {"GPU": 600}


PROMPT = KEYS[:5]


def test_groups_are_asked_together_and_the_others_as_ever() -> None:
    """Slot 0 has one group. Slots 1 and 2 have a full group and a window of two blocks, which 2 has lost in part."""
    index = holding(5, 5, 5)
    layout = Layout(16, (Group(0, "full", 1), Group(1, "window", 1, 2)))
    for slot, window in ((1, PROMPT[3:5]), (2, [PROMPT[0], PROMPT[1], PROMPT[3]])):
        index.apply(slot, Grouped(layout))
        index.apply(slot, Stored("GPU", list(window), list(window), 0, EVENT, 1))
    index.check()
    assert index.match(PROMPT, 0b111).gpu == {0: 5, 1: 5, 2: 2}
    assert index.match(PROMPT, 0b111, 4 * 16).gpu == {0: 5, 2: 2}, "what ends at the fourth is not in the window of 1"
    assert index.match(PROMPT, 0b001) == index.match(PROMPT, 0b001, 4 * 16)
    assert index.blocks(2) == {"GPU": 8}
    index.apply(2, Removed("GPU", [PROMPT[0]], 1))
    assert index.match(PROMPT, 0b110).gpu == {1: 5}
    index.apply(1, Grouped(None))
    assert index.match(PROMPT[:4], 0b110).gpu == {1: 4}
    index.drop(1)
    index.drop(2)
    index.check()
    assert list(index.pools) == [("GPU", 0)] and index.match(PROMPT, 0b001).gpu == {0: 5}


def test_blocks_that_several_groups_hold_are_used_once() -> None:
    index = holding(4, 5)
    layout = Layout(16, (Group(0, "full", 1), Group(2, "full", 2), Group(1, "window", 1, 2)))
    index.apply(0, Grouped(layout))
    index.apply(0, Stored("GPU", PROMPT[2:4], PROMPT[2:4], 0, EVENT, 1))
    index.apply(0, Stored("GPU", [PROMPT[1]], [PROMPT[1]], 0, EVENT, 2))
    index.apply(0, Stored("CPU", PROMPT[:2], PROMPT[:2], 0, EVENT))
    assert (index.blocks(0), index.prompt_blocks(0)) == ({"GPU": 7, "CPU": 2}, {"GPU": 2})
    index.apply(0, Stored("CPU", [PROMPT[1]], [PROMPT[1]], 0, EVENT, 2))
    assert index.prompt_blocks(0) == {"GPU": 2, "CPU": 2}
    assert index.blocks(1) == index.prompt_blocks(1) == {"GPU": 5}
    index.check()


def test_without_a_group_of_whole_prefixes_the_group_with_the_fewest_blocks_counts() -> None:
    index = holding(4)
    index.apply(0, Grouped(Layout(16, (Group(0, "window", 1, 2), Group(1, "state", 2)))))
    index.apply(0, Stored("GPU", [PROMPT[1]], [PROMPT[1]], 0, EVENT, 1))
    assert (index.blocks(0), index.prompt_blocks(0)) == ({"GPU": 5}, {"GPU": 2})


def test_a_hit_ends_where_every_group_accepts_it() -> None:
    index = holding(5, 5)
    index.apply(0, Grouped(Layout(16, (Group(0, "full", 2), Group(1, "window", 1, 1)))))
    assert [index.longest_hit(slot, 5) for slot in (0, 1)] == [4, 5]


def test_pairs_are_looked_up_without_the_last_token() -> None:
    """As SGLang does with EAGLE: of a prompt of two blocks and one token the second is no hit."""
    index = PrefixIndex()
    slot = index.add()
    index.apply(slot, Grouped(Layout(16, (Group(0, "full", 1),), lookahead=1, pairs=True)))
    index.apply(slot, Stored("GPU", PROMPT[:2], PROMPT[:2], 0, EVENT))

    def found(tokens: int) -> int:
        named = PROMPT[: (tokens - 1) // 16]
        return index.match([], 1 << slot, tokens - 1, lambda _: named).gpu.get(slot, 0)

    assert [found(tokens) for tokens in (16, 17, 18, 33, 34, 64)] == [0, 0, 1, 1, 2, 2]


def test_groups_in_lower_media_add_to_those_in_gpu_memory() -> None:
    index = holding(2)
    index.apply(0, Grouped(Layout(16, (Group(0, "full", 1), Group(1, "state", 1)))))
    index.apply(0, Stored("GPU", [PROMPT[1]], [PROMPT[1]], 0, EVENT, 1))
    index.apply(0, Stored("CPU", PROMPT[2:4], PROMPT[2:4], 0, EVENT))
    index.apply(0, Stored("CPU", [PROMPT[3]], [PROMPT[3]], 0, EVENT, 1))
    assert index.match(PROMPT, 1) == Matches({0: 2}, {0: 2}, (("CPU", {0: 4}),))


def test_an_optimistic_entry_of_a_group_is_never_lost_to_a_lower_medium() -> None:
    index = holding(2)
    index.apply(0, Grouped(Layout(16, (Group(0, "full", 1), Group(1, "full", 1)))))
    index.apply(0, Stored("GPU", PROMPT[:2], PROMPT[:2], 0, EVENT, 1))
    index.apply(0, Stored("CPU", PROMPT[2:3], PROMPT[2:3], 0, EVENT))
    index.apply(0, Stored("CPU", PROMPT[2:3], PROMPT[2:3], 0, EVENT, 1))
    index.optimistic.add(0, PROMPT[2:4], 1.0)
    assert index.match(PROMPT, 1).lower == {0: 4}
