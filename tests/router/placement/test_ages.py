from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.ages import MAX_GROUPS, PAGE_TOKENS, SHORTEST_S, CacheAges, Reuse, page_tokens, pages_of


class Certain(Reuse):
    """Whatever was asked for within so long comes again."""

    def __init__(self, within_s: float = inf) -> None:
        super().__init__()
        self.within_s = within_s

    def chance(self, idle_s: float) -> float:
        return float(idle_s < self.within_s)


def ages_of(pages: int, reuse: Reuse | None = None) -> CacheAges:
    ages = CacheAges(Certain() if reuse is None else reuse)
    ages.describe(PAGE_TOKENS, pages * PAGE_TOKENS)
    return ages


@pytest.mark.parametrize("block_tokens", [1, 16, 64, 100, 512, 1024, 4096])
def test_pages_stand_for_about_as_many_tokens_as_there_are(block_tokens: int) -> None:
    keys = [key * 0x9E3779B97F4A7C15 % 2**64 >> 3 for key in range(1 << 16)]
    tokens = len(pages_of(keys, block_tokens)) * page_tokens(block_tokens)
    assert tokens == pytest.approx(len(keys) * block_tokens, rel=0.2)
    assert block_tokens <= page_tokens(block_tokens) <= max(block_tokens, PAGE_TOKENS)


def test_the_same_blocks_stand_for_a_prefix_in_every_prompt_that_has_it() -> None:
    prefix, rest = list(range(1, 1000, 3)), list(range(5000, 6000, 3))
    assert set(pages_of(prefix, 16)) <= set(pages_of(prefix + rest, 16))


def test_free_room_costs_nothing_and_the_rest_its_price() -> None:
    ages = ages_of(10)
    ages.routed(range(7), 0.0)
    assert ages.lost_tokens(5 * PAGE_TOKENS, 1.0) == 2 * PAGE_TOKENS


def test_long_unused_prefixes_go_first_and_cost_little() -> None:
    ages = ages_of(10, Certain(within_s=60.0))
    ages.routed(range(4), 0.0)
    ages.routed(range(100, 106), 100.0)
    assert ages.lost_tokens(4 * PAGE_TOKENS, 110.0) == 0
    assert ages.lost_tokens(6 * PAGE_TOKENS, 110.0) == 2 * PAGE_TOKENS
    ages.routed(range(4), 109.0)  # now the others are the oldest, and yet not old
    assert ages.lost_tokens(4 * PAGE_TOKENS, 110.0) == 4 * PAGE_TOKENS


def test_what_falls_into_host_memory_costs_its_way_back_and_what_falls_out_of_it_the_rest() -> None:
    ages = CacheAges(Certain())
    ages.describe(PAGE_TOKENS, 10 * PAGE_TOKENS, 5 * PAGE_TOKENS)
    ages.routed(range(10), 0.0)
    assert ages.lost_tokens(4 * PAGE_TOKENS, 1.0, 0.25) == 1 * PAGE_TOKENS, "host memory has room for four"
    assert ages.lost_tokens(7 * PAGE_TOKENS, 1.0, 0.25) == (7 * 0.25 + 2 * 0.75) * PAGE_TOKENS
    assert ages.lost_tokens(7 * PAGE_TOKENS, 1.0, 0.25, from_host=2 * PAGE_TOKENS) == 7 * 0.25 * PAGE_TOKENS
    ages.routed(range(100, 110), 100.0)
    ages.check()
    assert len(ages) == 15
    rested = CacheAges(Certain(within_s=60.0))
    rested.describe(PAGE_TOKENS, 10 * PAGE_TOKENS, 5 * PAGE_TOKENS)
    rested.routed(range(10), 0.0)
    rested.routed(range(100, 105), 100.0)
    assert rested.lost_tokens(5 * PAGE_TOKENS, 110.0, 0.25) == 0, "what is evicted from either has rested for long"
    assert rested.lost_tokens(10 * PAGE_TOKENS, 110.0, 0.25) == 5 * 0.25 * PAGE_TOKENS


def test_what_was_sent_there_is_owed_room_already() -> None:
    """Else a burst would go where old blocks are, and each of it would count the same ones."""
    ages = ages_of(10, Certain(within_s=60.0))
    ages.routed(range(10), 0.0)
    assert ages.lost_tokens(10 * PAGE_TOKENS, 100.0) == 0
    ages.routed(range(100, 110), 100.0)
    assert ages.lost_tokens(10 * PAGE_TOKENS, 100.0) == 10 * PAGE_TOKENS


def test_a_prompt_for_which_there_is_no_room_is_charged_for_what_it_waits_for() -> None:
    ages = ages_of(10, Certain(within_s=0.0))
    ages.routed(range(10), 0.0)
    assert ages.lost_tokens(15 * PAGE_TOKENS, 1.0) == 5 * PAGE_TOKENS


def test_no_finding_for_a_cache_of_unknown_size() -> None:
    ages = ages_of(10)
    ages.routed(range(10), 0.0)
    ages.describe(0, 0)
    assert not ages.may_evict and len(ages) == 0
    ages.routed(range(10), 1.0)
    assert ages.lost_tokens(10**6, 2.0) == 0
    ages.check()


def test_a_cache_that_is_nearly_empty_is_not_looked_at() -> None:
    ages = ages_of(10)
    known = [ages.may_evict]
    ages.routed(range(6), 0.0)
    known.append(ages.may_evict)
    ages.clear()
    assert [*known, ages.may_evict] == [False, True, False]


def test_what_never_arrived_is_not_counted() -> None:
    ages = ages_of(10)
    ages.routed(range(10), 0.0)
    ages.routed(range(100, 106), 1.0)
    ages.forget(range(100, 200))
    ages.check()
    assert len(ages) == 4
    assert ages.lost_tokens(6 * PAGE_TOKENS, 2.0) == 0


def test_an_old_page_that_stays_does_not_make_groups_pile_up() -> None:
    ages = ages_of(20)
    for second in range(5000):
        ages.routed([0, *range(100 + second % 5, 110)] if second % 100 else range(1000, 1003), 3.0 * second)
        assert len(ages._groups) <= 2 * MAX_GROUPS + 1
    ages.check()


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=12, unique=True), st.floats(0, 50)), max_size=60))
def test_it_holds_what_a_list_of_the_last_used_holds(prompts: list[tuple[list[int], float]]) -> None:
    reuse, now_s = Certain(), 0.0
    ages = ages_of(10, reuse)
    used: list[tuple[int, float]] = []  # oldest first
    for pages, pause_s in prompts:
        now_s += pause_s
        ages.routed(pages, now_s)
        used = [one for one in used if one[0] not in pages] + [(page, now_s) for page in reversed(pages)]
        used = used[-10:]
        ages.check()
    assert len(ages) == len(used)
    reuse.within_s = inf
    assert ages.lost_tokens(4 * PAGE_TOKENS, now_s) == PAGE_TOKENS * max(0, 4 - (10 - len(used)))
    reuse.within_s = 25.0
    price = ages.lost_tokens(10 * PAGE_TOKENS, now_s) / PAGE_TOKENS
    told_apart_s = max(SHORTEST_S, now_s / MAX_GROUPS)
    assert (
        sum(now_s - at_s + told_apart_s < 25 for _, at_s in used) <= price <= sum(now_s - at_s < 25 for _, at_s in used)
    )
