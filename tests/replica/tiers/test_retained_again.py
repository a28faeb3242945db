"""Retained blocks that the pool gives up, and that come back from lower media."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.cache.lower import LowerTiers
from replica.cache.moves import Written
from tests.replica.engines import SIZE, chain

TTL_S = 300.0
RETAINED, PER_TENANT = 6, 4


class Pool(BlockPool):
    """Moves whatever it is asked to move at once."""

    def __init__(self, num_blocks: int = 8, host_slots: int = 32, disk_slots: int = 0) -> None:
        super().__init__(
            num_blocks,
            SIZE,
            host_slots=host_slots,
            disk_slots=disk_slots,
            retained_blocks=RETAINED,
            retained_per_tenant=PER_TENANT,
        )
        assert self.lower is not None
        self.tiers: LowerTiers = self.lower
        self.retention.at_once = 1

    def marks(self) -> int:
        return self.retention.marked

    def settle(self) -> None:
        writes = self.tiers.saved(self.tiers.take_saves())
        self.tiers.written([Written(write, done=True) for write in writes])

    def ask(self, prompt: Chain, ttl_s: float = 0.0) -> None:
        """Take a request through the pool; what lower media hold is loaded."""
        match = self.match(prompt)
        self.tiers.hold(match.lower)
        blocks = self.take(match.blocks, -(-len(prompt) // SIZE) - len(match.blocks))
        assert blocks is not None
        prompt.named, prompt.identity = len(match.blocks), match.identity
        self.settle()
        self.store(prompt, blocks, len(match.blocks) + len(match.lower))
        self.tiers.release(match.lower, loaded=True)
        self.store(prompt, blocks, len(prompt.keys))
        if ttl_s:
            self.retain(blocks[: prompt.named], prompt.cache_salt, ttl_s)
        self.release(blocks)
        self.settle()
        self.check()

    def press(self) -> None:
        """Use every block, so that no retained one is left."""
        blocks = self.take((), self.num_blocks)
        assert blocks is not None
        self.settle()
        self.release(blocks)
        assert not self.marks()


def prompt(first: int = 0, blocks: int = 3, tenant: str | None = None) -> Chain:
    return chain(range(first, first + blocks * SIZE + 1), cache_salt=tenant)


def test_a_block_that_comes_back_from_the_host_is_retained_again() -> None:
    pool = Pool()
    pool.ask(prompt(), TTL_S)
    pool.press()
    pool.expire(TTL_S - 1)
    pool.ask(prompt())
    assert pool.marks() == 3
    pool.expire(2 * TTL_S - 2)
    assert pool.marks() == 3, "the use has not renewed the time"
    pool.expire(2 * TTL_S)
    assert not pool.marks()


def test_a_tail_takes_no_mark_of_what_its_slot_held_before() -> None:
    pool = Pool()
    pool.partial = True
    pool.ask(prompt(), TTL_S)
    pool.press()
    blocks = pool.take((), pool.num_blocks)
    assert blocks is not None
    for block in blocks:
        pool.keep_tail(chain(range(1000 * block, 1000 * block + 3)), [block], 2)
    pool.release(blocks)
    pool.touch(blocks)
    pool.check()
    assert not pool.marks()


def test_a_block_that_comes_back_from_the_disk_is_retained_again() -> None:
    pool = Pool(host_slots=8, disk_slots=32)
    pool.ask(prompt(), TTL_S)
    pool.press()
    for first in range(1000, 5000, 1000):
        pool.ask(prompt(first, 4))
    assert not pool.tiers.host.resident() & set(prompt().keys)
    pool.ask(prompt())
    assert pool.marks() == 3


def test_a_block_that_comes_back_too_late_is_like_any_other() -> None:
    pool = Pool()
    pool.ask(prompt(), TTL_S)
    pool.press()
    pool.expire(TTL_S)
    pool.ask(prompt())
    assert not pool.marks()


def test_a_block_that_was_given_up_but_not_yet_taken_is_retained_again() -> None:
    pool = Pool()
    pool.retention.at_once = 32
    pool.ask(prompt(), TTL_S)
    pool.release(pool.take((), 6) or [])
    assert not pool.marks()
    pool.settle()
    pool.ask(prompt())
    assert pool.marks() == 3


def test_a_retention_that_has_been_ended_below_the_pool_stays_ended() -> None:
    pool = Pool()
    pool.ask(prompt(), TTL_S)
    pool.press()
    match = pool.match(prompt())
    assert len(match.lower) == 3
    pool.end_retention(match.blocks, match.lower)
    pool.ask(prompt())
    assert not pool.marks()


def test_a_reset_forgets_the_marks_too() -> None:
    pool = Pool()
    pool.ask(prompt(), TTL_S)
    pool.press()
    assert pool.reset()
    assert not pool.tiers.past_marks


def test_no_more_marks_are_remembered_than_lower_media_have_slots() -> None:
    pool = Pool(host_slots=4)
    for first in range(0, 8000, 1000):
        pool.ask(prompt(first), TTL_S)
        pool.press()
    assert len(pool.tiers.past_marks) == 4


requests = st.tuples(st.integers(0, 2), st.sampled_from([None, "a"]), st.sampled_from([0.0, 10.0, 100.0]))
waits = st.sampled_from([5.0, 20.0, 60.0])


@given(st.lists(st.one_of(requests, waits, st.just("press")), min_size=8, max_size=30), st.sampled_from([0, 64]))
def test_marks_come_back_with_their_blocks_unless_time_or_share_ends_them(
    events: Sequence[tuple[int, str | None, float] | float | str], disk_slots: int
) -> None:
    pool, now_s, is_too_much = Pool(host_slots=64, disk_slots=disk_slots), 0.0, False
    kept: dict[tuple[int, str | None], tuple[float, float]] = {}  # when a mark ends, and its time
    for event in events:
        if event == "press":
            pool.press()
        elif isinstance(event, float):
            now_s += event
            pool.expire(now_s)
            kept = {own: (end_s, ttl_s) for own, (end_s, ttl_s) in kept.items() if end_s > now_s}
        elif isinstance(event, tuple):
            document, tenant, ttl_s = event
            pool.ask(prompt(1000 * document, 2, tenant), ttl_s)
            ttl_s = max(ttl_s, kept.get((document, tenant), (0.0, 0.0))[1])
            if ttl_s:
                kept[document, tenant] = now_s + ttl_s, ttl_s
            tenants = Counter(owner for _, owner in kept)
            is_too_much |= 2 * len(kept) > RETAINED or 2 * max(tenants.values(), default=0) > PER_TENANT
            marked = pool.count_retained(pool.match(prompt(1000 * document, 2, tenant)).blocks)
            assert marked == 0 or ttl_s, "a block is retained that nobody asked for, or whose time is over"
            assert marked == 2 or not ttl_s or is_too_much, "a mark is lost, although there is room"
        pool.check()
