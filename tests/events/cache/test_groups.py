"""Hits over groups: against an engine that asks its groups one after another until none shortens the prefix."""

import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise
from math import lcm
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.blocks import block_keys, extend_keys, pack_tokens, root_key
from events.cache.changes import Grouped, Stored
from events.cache.groups import FULL, STATE, WINDOW, Group, Groups, Layout, hits
from events.cache.hash_chain import ENCODINGS, SEED, cbor
from events.cache.pool import low64
from events.cache.resolver import Resolver
from events.messages import BlockRemoved, BlockStored, Token

MODEL = "m"

# ---- the engine: as its sources describe the search, written for reading


def finder(group: Group, held: set[int], bound: int, step: int) -> int:
    """The units of the longest prefix within the bound that this group alone accepts."""
    blocks = bound // group.units
    if group.rule == FULL:
        run = next((block for block in range(blocks) if block not in held), blocks) * group.units
        return run - run % step
    if group.rule == STATE:
        ends = [block + 1 for block in range(blocks) if block in held]
        return max((end * group.units for end in ends if end * group.units % step == 0), default=0)
    run = 0
    for block in range(blocks - 1, -1, -1):  # from the right, the run begins at an end that may be a hit
        if block not in held:
            run = 0
        elif run or (block + 1) * group.units % step == 0:
            run += 1
            if run >= group.blocks:
                return (block + run) * group.units
    return run * group.units


def searched(groups: Sequence[Group], held: dict[int, set[int]], bound: int) -> int:
    step = lcm(*(group.units for group in groups))
    length = bound
    full: dict[int, int] = {}
    while True:
        found = length
        for group in groups:
            if group.rule == FULL and group.group in full:
                found = min(found, full[group.group])  # looked up once: a prefix of a full prefix is one
                continue
            found = finder(group, held[group.group], found, step)
            if group.rule == FULL:
                full[group.group] = found
        if found >= length:
            return found
        length = found


groups_of_engines = st.lists(
    st.tuples(st.sampled_from([FULL, WINDOW, WINDOW, STATE]), st.sampled_from([1, 1, 2, 3]), st.integers(1, 4)),
    min_size=1,
    max_size=4,
).map(
    lambda kinds: [
        Group(number, rule, units, blocks if rule == WINDOW else 0)
        for number, (rule, units, blocks) in enumerate(sorted(kinds, key=lambda kind: kind[0] != FULL))
    ]
)


@given(
    groups_of_engines, st.integers(0, 30), st.integers(0, 2**32), st.sampled_from([0.5, 0.8, 0.95]), st.integers(1, 3)
)
def test_the_hit_is_what_asking_the_groups_in_turn_ends_at(
    groups: list[Group], units: int, seed: int, share: float, replicas: int
) -> None:
    chance, layout = random.Random(seed), Layout(16, tuple(groups))
    held = [
        {group.group: {block for block in range(31) if chance.random() < share} for group in groups}
        for _ in range(replicas)
    ]

    def masks_of(number: int, keys: Sequence[int]) -> list[int]:
        size = groups[number].units
        return [sum(1 << slot for slot, own in enumerate(held) if key // size in own[number]) for key in keys]

    expected = {slot: searched(groups, own, units) for slot, own in enumerate(held)}
    found = hits(layout, range(units), masks_of, (1 << replicas) - 1)
    assert found == {slot: length for slot, length in expected.items() if length}


def parts_searched(full: set[int], states: set[int], units: int, bound: int) -> int:
    """The search where a hit may end inside of a block; `full` and `states` are the ends of prefixes that are held."""
    whole = 0
    while whole + units <= bound and whole + units in full:
        whole += units
    longest = max((end for end in range(whole, min(whole + units - 1, bound) + 1) if end in full), default=whole)
    return max((end for end in states if end <= longest), default=0)


@given(st.sets(st.integers(1, 20)), st.sets(st.integers(1, 20)), st.sampled_from([1, 2, 4]), st.integers(0, 20))
def test_a_hit_may_end_inside_of_a_block_where_states_are_kept_there(
    full: set[int], states: set[int], units: int, bound: int
) -> None:
    layout = Layout(16, (Group(0, FULL, units), Group(1, STATE, 4)), parts=True)
    ends = {0: full, 1: states}
    found = hits(layout, range(bound), lambda group, keys: [int(key + 1 in ends[group]) for key in keys], 1)
    assert found.get(0, 0) == parts_searched(full, states, units, bound)


# ---- what the events say about groups


def stored(
    hashes: Sequence[Any],
    tokens: Sequence[Token],
    group: int,
    kind: str | None,
    window: int | None = None,
    *,
    size: int = 2,
    parent: Any = None,
) -> BlockStored:
    return BlockStored(
        list(hashes),
        parent,
        list(tokens),
        size,
        None,
        "GPU",
        None,
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


def layout_of(*events: BlockStored) -> tuple[Layout | None, str | None]:
    groups = Groups()
    for event in events:
        groups.learn(event)
    return groups.layout, groups.doubt


def test_one_group_that_keeps_whole_prefixes_needs_no_layout() -> None:
    for kind in (None, "full_attention", "mla_attention", "sink_full_attention"):
        assert layout_of(stored([1], [1, 2], 0, kind)) == (None, None)


def test_a_window_needs_as_many_blocks_as_its_tokens_but_one_reach_into() -> None:
    for window, blocks in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (128, 64)):
        assert layout_of(stored([1], [1, 2], 0, "sliding_window", window)) == (
            Layout(2, (Group(0, WINDOW, 1, blocks),)),
            None,
        )


def test_the_unit_divides_the_blocks_of_all_groups() -> None:
    layout, doubt = layout_of(
        stored([1], range(6), 0, "sliding_window_mla", 13, size=6), stored([1], range(4), 1, "full_attention", size=4)
    )
    assert (layout, doubt) == (Layout(2, (Group(1, FULL, 2), Group(0, WINDOW, 3, 2))), None)
    assert layout is not None and layout.step == 6


@pytest.mark.parametrize(
    ("kind", "window", "said"),
    [
        (None, None, "group 1 does not say what kind of attention it serves"),
        ("chunked_local_attention", None, "group 1 is of the kind chunked_local_attention, whose hits cannot be"),
        ("cross_attention", None, "group 1 is of the kind cross_attention"),
        ("new_kind", None, "group 1 is of the kind new_kind"),
        ("sliding_window", None, "group 1 (sliding_window) does not say how long its window is"),
    ],
)
def test_a_group_whose_hits_cannot_be_predicted_is_named(kind: str | None, window: int | None, said: str) -> None:
    resolver = Resolver(MODEL)
    resolver.apply([stored([1], [1, 2], 0, "full_attention"), stored([1], [1, 2], 1, kind, window)])
    assert resolver.inexact is not None and resolver.inexact.startswith(said)
    layout = resolver.groups.layout
    assert layout is not None and [group.group for group in layout.groups] == [0]


def test_states_are_looked_up_inside_of_blocks_unless_a_window_has_larger_ones() -> None:
    full, state = stored([1], [1, 2], 0, "full_attention"), stored([1], range(4), 1, "mamba", size=4)
    layout, _ = layout_of(full, state)
    assert layout is not None and layout.parts
    layout, _ = layout_of(full, state, stored([1], range(4), 2, "sliding_window", 9, size=4))
    assert layout is not None and not layout.parts


# ---- keys

TOKENS = list(range(12))
KEYS = block_keys(TOKENS, 2, root_key(MODEL, block_size=2))


def test_groups_are_sets_of_their_own() -> None:
    resolver = Resolver(MODEL)
    changes = resolver.apply(
        [
            stored([1, 2, 3, 4], TOKENS[:8], 0, "full_attention"),
            stored([3, 4], TOKENS[:8], 1, "sliding_window", 4),
        ]
    )
    layout = Layout(2, (Group(0, FULL, 1), Group(1, WINDOW, 1, 2)))
    assert changes[0] == Grouped(layout)
    told = [(change.group, change.keys) for change in changes if isinstance(change, Stored)]
    assert told == [(0, KEYS[:4]), (1, KEYS[2:4])]
    assert [resolver.matched(KEYS[:bound]) for bound in range(6)] == [0, 0, 0, 0, 4, 4]
    resolver.apply([BlockRemoved([3], "GPU", 1)])
    assert (resolver.matched(KEYS), resolver.keys(), resolver.inexact) == (0, set(KEYS[:4]), None)
    resolver.check()


def test_a_sparse_group_that_comes_first_waits_for_the_names_of_another() -> None:
    resolver = Resolver(MODEL)
    resolver.apply(
        [
            stored([3, 4], TOKENS[:8], 0, "sliding_window", 4),
            stored([1, 2, 3, 4], TOKENS[:8], 1, "full_attention"),
        ]
    )
    assert (resolver.matched(KEYS), resolver.orphan_blocks, resolver.inexact) == (4, 0, None)
    assert resolver.pools["GPU", 0].held == set(KEYS[2:4])
    resolver.check()


def test_a_group_of_larger_blocks_has_the_keys_at_their_ends() -> None:
    resolver = Resolver(MODEL)
    resolver.apply(
        [
            stored([1, 2, 3, 4, 5, 6], TOKENS, 0, "full_attention"),
            stored([2, 4], TOKENS[:8], 1, "mamba", size=4),
            stored([6], TOKENS[8:], 1, "mamba", size=4, parent=4),
        ]
    )
    assert resolver.pools["GPU", 1].held == {KEYS[1], KEYS[3], KEYS[5]}
    assert resolver.inexact is None


def test_a_group_without_blocks_to_name_is_still_there() -> None:
    resolver = Resolver(MODEL)
    resolver.apply([stored([1], TOKENS[:2], 0, "full_attention"), stored([], TOKENS[:2], 1, "sliding_window", 4)])
    assert resolver.groups.layout is not None and resolver.matched(KEYS) == 0


def digests(encode: Callable[[Any], bytes], tokens: Sequence[int], salt: str | None = None) -> list[bytes]:
    """As vLLM names blocks of two tokens."""
    chain, extra = [sha256(encode(SEED)).digest()], (("cache_salt", salt),) if salt else None
    for first in range(0, len(tokens), 2):
        chain.append(sha256(encode((chain[-1], tuple(tokens[first : first + 2]), extra))).digest())
        extra = None
    return chain[1:]


@pytest.mark.parametrize("encode", ENCODINGS)
@pytest.mark.parametrize("form", [bytes, low64])
def test_blocks_of_a_sparse_group_alone_are_named_by_their_hashes(
    encode: Callable[[Any], bytes], form: Callable[[bytes], Any]
) -> None:
    resolver, names = Resolver(MODEL), [form(digest) for digest in digests(encode, TOKENS)]
    resolver.apply([stored(names[1:3], TOKENS[:8], 0, "sliding_window", 4)])
    assert (resolver.pools["GPU", 0].held, resolver.inexact) == (set(KEYS[1:3]), None)
    resolver.apply([stored([], TOKENS[8:10], 0, "sliding_window", 4, parent=names[3])])
    resolver.apply([stored(names[5:], TOKENS[10:], 0, "sliding_window", 4, parent=names[4])])
    assert (resolver.pools["GPU", 0].held, resolver.inexact) == ({*KEYS[1:3], KEYS[5]}, None)
    assert [resolver.matched(KEYS[:bound]) for bound in range(7)] == [0, 0, 0, 3, 3, 3, 3]
    resolver.apply([BlockRemoved([names[2]], "GPU", 0)])
    assert resolver.matched(KEYS) == 0
    resolver.check()


def test_a_report_in_a_sparse_group_alone_stores_nothing_and_is_said() -> None:
    """It names all blocks of a hit, of which the group holds the last two."""
    resolver, names = Resolver(MODEL), digests(ENCODINGS[0], TOKENS)
    resolver.apply([stored(names[2:4], TOKENS[:8], 0, "sliding_window", 4)])
    resolver.apply([stored(names[:4], TOKENS[:8], 0, "sliding_window", 4)])
    assert resolver.pools["GPU", 0].held == set(KEYS[2:4])
    assert resolver.inexact is not None and resolver.inexact.startswith("requests ask for reports")


def test_hashes_of_another_algorithm_name_no_blocks_of_a_sparse_group_and_that_is_said() -> None:
    resolver = Resolver(MODEL)
    resolver.apply([stored([3, 4], TOKENS[:8], 0, "sliding_window", 4)])
    assert resolver.inexact is not None and resolver.inexact.startswith("group 0 keeps some of the blocks that")


@given(st.integers(0, 2**64 - 1))
def test_numbers_are_encoded_in_the_fewest_bytes(value: int) -> None:
    encoded = cbor(value)
    sizes = [size for size in (0, 1, 2, 4, 8) if value < (24 if not size else 1 << (8 * size))]
    assert len(encoded) == 1 + sizes[0] and encoded[0] < 0x20
    assert int.from_bytes(encoded[1:] or encoded) == value


def test_other_block_sizes_than_the_first_events_said_make_the_keys_outgrown() -> None:
    resolver = Resolver(MODEL)
    resolver.apply([stored([2], TOKENS[:4], 0, "full_attention", size=4)])
    resolver.apply([stored([1], TOKENS[:2], 1, "sliding_window", 4)])
    assert str(resolver.inexact) == "its groups have turned out to have other block sizes than its first events said"
    resolver.reset()
    resolver.apply([stored([2], TOKENS[:4], 0, "full_attention", size=4)])
    assert (resolver.keys(), resolver.inexact) == ({KEYS[1]}, None)


def test_another_process_may_have_other_groups() -> None:
    resolver = Resolver(MODEL)
    resolver.apply([stored([1], TOKENS[:2], 0, "full_attention"), stored([1], TOKENS[:2], 1, "mamba")])
    resolver.restarted()
    resolver.reset()
    changes = resolver.apply([stored([1], TOKENS[:2], 0, "full_attention")])
    assert changes[0] == Grouped(None) and resolver.matched(KEYS) == 1


# ---- hashes that look ahead


def ahead_of(tokens: Sequence[int], first: int, end: int, lookahead: int) -> list[list[int]]:
    return [list(tokens[2 * block + 2 : 2 * block + 2 + lookahead]) for block in range(first, end)]


@pytest.mark.parametrize("lookahead", [1, 3])
def test_keys_cover_the_tokens_that_the_hashes_look_ahead_to(lookahead: int) -> None:
    resolver, root = Resolver(MODEL), root_key(MODEL, block_size=2)
    keys = block_keys_ahead(TOKENS, lookahead)
    first, rest = stored([1, 2], TOKENS[:4], 0, "full_attention"), stored([3, 4], TOKENS[4:8], 0, None, parent=2)
    first.lookahead_token_ids = ahead_of(TOKENS, 0, 2, lookahead)
    rest.lookahead_token_ids = ahead_of(TOKENS, 2, 4, lookahead)
    changes = resolver.apply([first, rest])
    assert changes[0] == Grouped(Layout(2, (Group(0, FULL, 1),), lookahead=lookahead))
    assert (resolver.keys(), resolver.matched(keys), resolver.inexact) == (set(keys[:4]), 4, None)
    fork = [*TOKENS[:4], 99, *TOKENS[5:]]
    whole = (4 - lookahead) // 2  # blocks that end this many tokens before the fork
    assert resolver.matched(block_keys_ahead(fork, lookahead)) == whole
    assert not resolver.keys() & set(block_keys(TOKENS, 2, root))


def test_pairs_name_a_block_by_the_token_after_it_too() -> None:
    resolver, pairs = Resolver(MODEL), list(pairwise(TOKENS))
    changes = resolver.apply([stored([1, 2], pairs[:4], 0, None), stored([3], pairs[4:6], 0, None, parent=2)])
    assert changes[0] == Grouped(Layout(2, (Group(0, FULL, 1),), lookahead=1, pairs=True))
    assert resolver.keys() == set(block_keys_ahead(TOKENS, 1)[:3])
    assert resolver.matched(block_keys_ahead([*TOKENS[:4], 99, *TOKENS[5:]], 1)) == 1


@pytest.mark.parametrize("pairs", [[(1, 2), 3], [(1, 2), (2, -1)]])
def test_pairs_that_are_none_are_declared(pairs: list[Any]) -> None:
    resolver = Resolver(MODEL)
    resolver.apply([stored([1], pairs, 0, None)])
    assert resolver.keys() == set()
    assert resolver.stats.unpaired_blocks == 1


def block_keys_ahead(tokens: Sequence[int], lookahead: int) -> list[int]:
    keys = extend_keys(root_key(MODEL, block_size=2), pack_tokens(tokens), 2, lookahead=lookahead)
    assert len(keys) == (len(tokens) - lookahead) // 2
    return keys


def test_groups_of_larger_blocks_look_ahead_too() -> None:
    resolver, keys = Resolver(MODEL), block_keys_ahead(TOKENS, 1)
    full, state = stored([1, 2, 3, 4], TOKENS[:8], 0, "full_attention"), stored([2, 4], TOKENS[:8], 1, "mamba", size=4)
    full.lookahead_token_ids = ahead_of(TOKENS, 0, 4, 1)
    state.lookahead_token_ids = [[TOKENS[4]], [TOKENS[8]]]
    resolver.apply([full, state])
    assert (resolver.pools["GPU", 1].held, resolver.inexact) == ({keys[1], keys[3]}, None)


def test_events_that_lack_their_lookahead_name_nothing() -> None:
    resolver = Resolver(MODEL)
    event = stored([1, 2], TOKENS[:4], 0, "full_attention")
    event.lookahead_token_ids = [[4], []]
    resolver.apply([event])
    assert (resolver.keys(), resolver.stats.unpaired_blocks) == (set(), 2)


@pytest.mark.parametrize("ahead", [None, 1])
def test_hits_of_an_engine_that_speculates_are_called_exact_if_its_hashes_look_ahead(ahead: int | None) -> None:
    resolver = Resolver(MODEL)
    resolver.speculates = True
    event = stored([1, 2], TOKENS[:4], 0, "full_attention")
    event.lookahead_token_ids = None if ahead is None else ahead_of(TOKENS, 0, 2, ahead)
    resolver.apply([event])
    reason = "it speculates, and its hashes do not look ahead: with EAGLE or MTP a hit is a block shorter"
    assert resolver.inexact == (reason if ahead is None else None)


def test_an_engine_of_countless_groups_is_not_followed_in_them() -> None:
    resolver = Resolver(MODEL)
    resolver.apply([stored([], TOKENS[:2], 0, "sliding_window", window) for window in range(1, 400)])
    resolver.apply([stored([], TOKENS[:2], group, "sliding_window", 4) for group in range(400)])
    assert resolver.inexact == "its events name more than 256 media, groups and kinds"
    assert not resolver.pools and len(resolver.groups.known) == 256
    assert resolver.groups.layout is not None and len(resolver.groups.layout.groups) == 1
