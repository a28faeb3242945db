"""The block pool, one rule a test; docs/concepts.md tells the same in prose."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from events.messages import BlockRemoved, BlockStored
from replica.cache.block_pool import BlockPool
from replica.cache.contents import NOT_NAMED
from replica.cache.names import NO_MATCH, NO_PART, Match, PartialBlock
from tests.replica.engines import SIZE, admit, chain, forged, serve

A, B, C, D = ([letter] * SIZE for letter in (1, 2, 3, 4))
MORE = [9]  # one token after the last full block, so that all full blocks may hit

REFUSED = Match([], 0, refused=True)


def hits(pool: BlockPool, tokens: list[int], **extra: Any) -> int:
    return len(pool.match(chain(tokens, **extra)).blocks)


def state(pool: BlockPool, block: int) -> str:
    assert (block in pool.free_queue()) == (pool.references(block) == 0)
    if pool.references(block):
        return "live"
    return "free" if pool._contents.parent[block] == NOT_NAMED else "cached and free"


# ---- the state diagram


def test_take_and_release_move_a_block_through_its_three_states() -> None:
    pool = BlockPool(1, SIZE)
    request = chain(A)
    walk = [state(pool, 0)]
    blocks = admit(pool, request)
    walk.append(state(pool, 0))
    pool.store(request, blocks, 1)
    pool.release(blocks)
    walk.append(state(pool, 0))
    again = pool.take(pool.match(chain(A + MORE)).blocks, 0)  # as a hit
    assert again == [0]
    walk.append(state(pool, 0))
    pool.release(again)
    walk.append(state(pool, 0))
    assert pool.take([], 1) == [0]  # as a new block: evicted
    walk.append(state(pool, 0))
    pool.release([0])
    walk.append(state(pool, 0))
    assert walk == ["free", "live", "cached and free", "live", "cached and free", "live", "free"]
    pool.check()


def test_reference_count_of_a_shared_block_walks_1_2_1_0() -> None:
    pool = BlockPool(4, SIZE)
    first, second = chain(A + MORE), chain(A + MORE)
    mine = admit(pool, first)
    pool.store(first, mine, 1)
    walk = [pool.references(mine[0])]
    theirs = admit(pool, second)
    assert theirs[0] == mine[0]
    walk.append(pool.references(mine[0]))
    pool.release(mine)
    walk.append(pool.references(mine[0]))
    pool.release(theirs)
    walk.append(pool.references(mine[0]))
    assert walk == [1, 2, 1, 0]
    assert hits(pool, A + MORE) == 1
    pool.check()


# ---- lazy LRU


def test_a_released_block_is_found_until_its_slot_is_handed_out() -> None:
    pool = BlockPool(3, SIZE)
    serve(pool, chain(A + MORE))
    for _ in range(2):  # two of the three blocks are nobody's yet
        pool.release(admit(pool, chain([7, 7])))
        assert hits(pool, A + MORE) == 1
    held = pool.take([], 3)
    assert held is not None
    assert hits(pool, A + MORE) == 0
    pool.check()


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(4, SIZE)
    for text in (A, B, C):
        serve(pool, chain(text))
    serve(pool, chain(A + MORE))  # hits A: now B is the oldest
    assert pool.take([], 2) is not None  # the block without a name, then B
    assert [hits(pool, text + MORE) for text in (A, B, C)] == [1, 0, 1]


def test_touch_rescues_a_block_from_the_free_queue() -> None:
    pool = BlockPool(2, SIZE)
    [block] = serve(pool, chain(A))
    assert block in list(pool.free_queue())
    pool.touch([block])
    assert block not in list(pool.free_queue())
    assert pool.take([], 2) is None  # what is rescued cannot be evicted
    assert pool.take([], 1) is not None
    assert hits(pool, A + MORE) == 1
    pool.check()


def test_the_tail_of_a_request_is_evicted_before_its_head() -> None:
    pool = BlockPool(4, SIZE)
    serve(pool, chain(A + B + C + D))
    for left in (3, 2, 1, 0):
        assert pool.take([], 1) is not None
        assert hits(pool, A + B + C + D + MORE) == left


def test_blocks_without_a_name_are_handed_out_before_any_cached_one() -> None:
    pool = BlockPool(3, SIZE)
    serve(pool, chain(A + B))
    unnamed = pool.take([], 1)
    assert unnamed is not None
    pool.release(unnamed)
    assert next(pool.free_queue()) == unnamed[0]
    pool.take([], 1)
    assert (hits(pool, A + B + MORE), pool.evictions) == (2, 0)


# ---- common misconceptions


def test_only_a_prefix_from_token_0_hits() -> None:
    pool = BlockPool(8, SIZE)
    serve(pool, chain(A + B + C))
    assert hits(pool, A + B + MORE) == 2
    assert hits(pool, B + C + MORE) == 0
    assert hits(pool, MORE + A + B + C) == 0
    assert hits(pool, D + B + C + MORE) == 0


def test_cached_blocks_take_no_memory_that_others_could_use() -> None:
    pool = BlockPool(4, SIZE)
    serve(pool, chain(A + B + C + D))
    assert (pool.named, pool.free) == (4, 4)
    assert pool.take([], 4) is not None


# ---- known wrong turns


def test_a_hit_in_the_free_queue_is_not_counted_as_evictable_too() -> None:
    pool = BlockPool(2, SIZE)
    serve(pool, chain(A + B))
    match = pool.match(chain(A + C + MORE))
    assert len(match.blocks) == 1
    assert pool.free == 2  # and yet there are not two new blocks beside the hit
    assert pool.take(match.blocks, 2) is None
    assert pool.take(match.blocks, 1) is not None


def test_partial_blocks_are_never_registered() -> None:
    pool = BlockPool(4, SIZE)
    serve(pool, chain(A + [5] * (SIZE - 1)))
    assert pool.named == 1
    assert hits(pool, A + [5] * SIZE + MORE) == 1


def test_the_middle_of_a_prompt_does_not_match() -> None:
    pool = BlockPool(6, SIZE)
    request = chain(A + B + C)
    blocks = admit(pool, request)
    pool.store(request, blocks, 3)
    pool.release(blocks[:1])  # a head that is gone, while its tail stays
    assert pool.take([], 4) is not None
    assert hits(pool, A + B + C + MORE) == 0
    assert hits(pool, B + C + MORE) == 0


@pytest.mark.parametrize("tokens", [1, SIZE - 1])
def test_a_prompt_shorter_than_a_block_neither_hits_nor_is_named(tokens: int) -> None:
    pool = BlockPool(2, SIZE)
    serve(pool, chain(A))
    short = chain(A[:tokens])
    assert pool.match(short) == NO_MATCH
    pool.release(admit(pool, short))
    assert pool.named == 1
    pool.check()


@pytest.mark.parametrize(("prompt", "expected"), [(A + B, 1), (A + B + MORE, 2), (A, 0), (A + MORE, 1)])
def test_a_prompt_that_is_fully_cached_still_computes_its_last_token(prompt: list[int], expected: int) -> None:
    pool = BlockPool(8, SIZE)
    serve(pool, chain(A + B))
    assert hits(pool, prompt) == expected


# ---- when it is full, and before it is


def test_take_gives_nothing_and_changes_nothing_when_there_is_no_room() -> None:
    pool = BlockPool(4, SIZE)
    serve(pool, chain(A + B))
    held = admit(pool, chain([7]))
    pool.take_events()
    before = (pool.snapshot(), list(pool.free_queue()), pool.resident())
    assert pool.take([], 4) is None
    assert pool.take(pool.match(chain(A + B + MORE)).blocks, 2) is None
    assert (pool.snapshot(), list(pool.free_queue()), pool.resident()) == before
    assert pool.take_events() == []
    pool.release(held)
    pool.check()


@pytest.mark.parametrize(("blocks", "size"), [(0, 1), (-1, 1), (1, 0)])
def test_a_pool_of_nothing_is_refused_with_the_value(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"is {min(blocks, size)}; it must be at least 1"):
        BlockPool(blocks, size)


def test_releasing_more_often_than_taking_is_caught() -> None:
    pool = BlockPool(1, SIZE)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release([0])


# ---- a hit is verified by content


def test_a_child_still_hits_when_the_copy_its_parent_was_is_recycled() -> None:
    """The parent is content, not a slot: another copy of it will do."""
    pool = BlockPool(4, SIZE)
    early, late = chain(A + MORE), chain(A + B)
    copy = admit(pool, early)
    blocks = admit(pool, late)  # looked up when A was not there yet
    pool.store(early, copy, 1)
    pool.store(late, blocks, 2)
    assert pool.take_events()
    pool.release(copy)
    assert pool.take([], 2) is not None  # recycles the copy of A that was named first
    assert hits(pool, A + B + MORE) == 2
    pool.check()


def test_a_forged_parent_does_not_hit_when_the_real_one_is_evicted() -> None:
    pool = BlockPool(4, SIZE)
    real = chain(A + B)
    blocks = admit(pool, real)
    pool.store(real, blocks, 2)
    pool.release(blocks[:1])
    others = pool.take([], 3)
    assert others is not None
    assert pool.resident() == {real.keys[1]}  # the child is left alone
    pool.release(others)
    parent = forged(C + MORE, real)
    held = admit(pool, parent)
    pool.store(parent, held, 1)
    assert pool.resident() == set(real.keys)  # the name was free
    assert pool.match(forged(C + B + MORE, real)).blocks == held[:1]  # and not the child of the real parent
    assert pool.match(chain(A + B + MORE)).refused
    assert hits(pool, A + B + MORE) == 0
    pool.check()


def test_other_tokens_of_the_same_key_do_not_hit() -> None:
    pool = BlockPool(6, SIZE)
    real = chain(A + B + C)
    serve(pool, real)
    assert pool.match(forged(A + D + C + MORE, real)).blocks == pool.match(chain(A + MORE)).blocks
    assert pool.match(forged(D + B + C + MORE, real)) == REFUSED


@pytest.mark.parametrize(
    ("owner", "thief"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({}, {"cache_salt": "b"}),
        ({"lora_name": "a"}, {"lora_name": "b"}),
        ({"lora_name": "a"}, {"cache_salt": "a"}),
        ({"extras": {0: [("image", 0)]}}, {"extras": {0: [("image", 1)]}}),
        ({"extras": {0: [b"digest"]}}, {}),
    ],
)
def test_another_tenants_block_does_not_hit_even_with_the_same_key(
    owner: dict[str, Any], thief: dict[str, Any]
) -> None:
    pool = BlockPool(8, SIZE)
    real = chain(A + B, **owner)
    serve(pool, real)
    forgery = forged(A + B + MORE, real, **thief)
    assert pool.match(forgery) == REFUSED
    assert hits(pool, A + B + MORE, **owner) == 2
    blocks = admit(pool, forgery)
    pool.store(forgery, blocks, 2)
    assert pool.named == 2  # nor does it take the name away
    assert hits(pool, A + B + MORE, **owner) == 2
    pool.check()


# ---- copies


def two_copies(pool: BlockPool, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Two requests with the same tokens, computed at the same time."""
    chains = chain(tokens), chain(tokens)
    first, second = admit(pool, chains[0]), admit(pool, chains[1])
    pool.store(chains[0], first, len(chains[0].keys))
    pool.store(chains[1], second, len(chains[1].keys))
    return first, second


@pytest.mark.parametrize("first_goes_first", [True, False])
def test_a_hash_is_announced_at_its_first_copy_and_removed_at_its_last(first_goes_first: bool) -> None:
    pool = BlockPool(4, SIZE)
    copies = two_copies(pool, A + B)
    stored = pool.take_events()
    assert [type(event) for event in stored] == [BlockStored]
    assert (pool.named, len(pool.resident())) == (4, 2)
    for blocks in copies if first_goes_first else copies[::-1]:
        pool.release(blocks)
    assert pool.take([], 2) is not None
    pool.check()
    assert pool.take_events() == []
    assert hits(pool, A + B + MORE) == 2
    assert pool.take([], 2) is not None
    [removed] = pool.take_events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == chain(A + B).keys.tolist()[::-1]
    pool.check()


# ---- what is announced


def test_stored_blocks_are_announced_with_all_that_their_names_are_made_of() -> None:
    pool = BlockPool(4, SIZE)
    request = chain(A + B + MORE, lora_name="adapter", cache_salt="salt")
    serve(pool, request)
    [event] = pool.take_events()
    assert (
        event
        == BlockStored(
            block_hashes=request.keys.tolist(),  # type: ignore[arg-type]
            parent_block_hash=None,
            token_ids=request.tokens[: 2 * SIZE],
            block_size=SIZE,
            lora_id=None,
            medium="GPU",
            lora_name="adapter",
            extra_keys=[["adapter", "salt"], ["adapter"]],
        )
    )


def test_evicted_blocks_are_announced_when_their_slots_are_handed_out_and_not_before() -> None:
    pool = BlockPool(2, SIZE)
    serve(pool, chain(A + B))
    assert [type(event) for event in pool.take_events()] == [BlockStored]
    pool.take([], 1)
    assert pool.take_events() == [BlockRemoved([chain(A + B).keys[1]], "GPU")]


# ---- check() sees what is wrong


@pytest.mark.parametrize(
    "harm",
    [
        lambda pool: setattr(pool._queue, "length", pool.free - 1),
        lambda pool: setattr(pool, "named", pool.named + 1),
        lambda pool: setattr(pool, "unreferenced", 0),
        lambda pool: pool._references.__setitem__(0, 1),
        lambda pool: pool._queue._next.__setitem__(pool.num_blocks, 1),
        lambda pool: pool._queue._previous.__setitem__(0, 0),
        lambda pool: pool._contents.parent.__setitem__(0, -1),
        lambda pool: pool._contents.identity.__setitem__(0, pool._contents.identity[1]),
        lambda pool: pool._names.remove(0),
        lambda pool: pool._names.copies.__setitem__(pool._names.keys[0], []),
        lambda pool: pool._contents.exact.__setitem__(5, b""),
        lambda pool: pool._contents.tokens.__setitem__(2, np.void(bytes(pool._contents.tokens.itemsize))),
    ],
)
def test_check_notices_a_broken_invariant(harm: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(6, SIZE)
    for blocks in two_copies(pool, A + B):
        pool.release(blocks)
    pool.check()
    harm(pool)
    with pytest.raises(AssertionError):
        pool.check()


# ---- parts of blocks


def parts(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, SIZE, partial=True)


def part(pool: BlockPool, tokens: list[int], **extra: Any) -> PartialBlock:
    request = chain(tokens, **extra)
    return pool.part(request, pool.match(request))


def test_the_longest_run_is_found_among_all_with_the_prefix() -> None:
    pool = parts(32)
    for tokens in ([1, 2, 7, 7], [1, 2, 3, 7], [1, 7, 7, 7], [2, 2, 3, 4]):
        serve(pool, chain(A + tokens))
    assert part(pool, [*A, 1, 2, 3, 4, *MORE]).tokens == 3


def test_the_end_of_a_text_is_found_though_it_fills_no_block() -> None:
    pool = parts()
    blocks = serve(pool, chain([*A, 1, 2, 3]))
    assert part(pool, [*A, 1, 2, 3, *MORE]) == PartialBlock(blocks[1], 3, adoptable=True)
    assert part(pool, [*A, 1, 2, 7]) == PartialBlock(
        blocks[1], 2, adoptable=False
    )  # writing on it would destroy the third
    assert part(pool, [*A, 1, 2, 3]) == PartialBlock(blocks[1], 2, adoptable=False)
    assert hits(pool, [*A, 1, 2, 3, *MORE]) == 1
    assert (pool.named, pool.unreferenced, len(pool.resident())) == (1, 1, 1)  # it has no name, and counts as free
    pool.check()


def test_a_tail_queues_like_a_cached_block_and_ends_when_its_slot_is_handed_out() -> None:
    pool = parts(2)
    blocks = serve(pool, chain([*A, 1, 2]))
    assert list(pool.free_queue()) == blocks[::-1]
    assert pool.take([], 1) == [blocks[1]]
    assert part(pool, [*A, 1, 2, *MORE]) == NO_PART
    assert (pool.evictions, hits(pool, A + MORE)) == (0, 1)
    pool.check()


def test_a_tail_that_another_block_holds_is_not_kept_twice() -> None:
    pool = parts()
    first, second = (serve(pool, chain([*A, 1, 2])) for _ in range(2))
    assert [pool.findable_tokens(blocks[1]) for blocks in (first, second)] == [2, 0]
    longer = serve(pool, chain([*A, 1, 2, 3]))
    assert pool.findable_tokens(longer[1]) == 3
    assert pool.findable_tokens(serve(pool, chain([*A, 1]))[1]) == 0


@pytest.mark.parametrize("extra", [{"cache_salt": "x"}, {"lora_name": "x"}, {"extras": {0: [("cat", 0)]}}])
@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 3, 4]])
def test_nothing_is_found_in_the_first_block_of_another_tenant_adapter_or_image(
    extra: dict[str, Any], tokens: list[int]
) -> None:
    pool = parts()
    serve(pool, chain(tokens, **extra))
    assert part(pool, [1, 2, *MORE]) == NO_PART
    assert part(pool, [1, 2, *MORE], **extra).tokens == 2
    serve(pool, chain([1, *MORE]))
    assert part(pool, [1, 2, *MORE], **extra).tokens == 2
    assert part(pool, [1, 2, *MORE]).tokens == 1
    pool.check()


@pytest.mark.parametrize("caching", [True, False])
def test_without_partial_reuse_or_caching_there_are_no_parts_and_no_tails(caching: bool) -> None:
    pool = BlockPool(4, SIZE, caching=caching, partial=not caching)
    blocks = serve(pool, chain([*A, 1, 2]))
    assert part(pool, [*A, 1, 2, *MORE]) == NO_PART
    assert pool.findable_tokens(blocks[1]) == 0
    assert (pool.named, bool(pool.take_events())) == (caching, caching)
    pool.check()


@pytest.mark.parametrize(
    "harm",
    [
        lambda pool: pool._contents.filled.__setitem__(1, 0),
        lambda pool: pool._contents.filled.__setitem__(1, SIZE + 1),
        lambda pool: pool._contents.parent.__setitem__(1, 9),
        lambda pool: setattr(pool, "partial", False),
    ],
)
def test_check_notices_a_broken_tail(harm: Callable[[BlockPool], object]) -> None:
    pool = parts(4)
    assert serve(pool, chain([*A, 1, 2]))[1] == 1
    pool.check()
    harm(pool)
    with pytest.raises(AssertionError):
        pool.check()
