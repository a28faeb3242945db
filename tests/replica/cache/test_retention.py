import numpy as np

from replica.cache.names import Slots
from replica.cache.retention import Retention

TTL_S = 300.0


def slots(*blocks: int) -> Slots:
    return np.array(blocks, np.intp)


def marked(retention: Retention, tenant: str | None, blocks: Slots, ttl_s: float = TTL_S) -> list[int]:
    """Mark blocks that no request uses any more; return those that lost their mark for it."""
    displaced = retention.mark(blocks, tenant, ttl_s)
    retention.wait(blocks[retention.is_marked(blocks)])
    retention.check()
    return list(map(int, displaced))


def test_what_would_end_soonest_is_given_up_first() -> None:
    retention = Retention(8, 8, 8)
    retention.at_once = 1
    marked(retention, None, slots(0, 1), ttl_s=3600)
    marked(retention, None, slots(2, 3), ttl_s=300)
    retention.use(slots(2))
    assert retention.order().tolist() == [3, 0, 1]
    assert retention.end(retention.first_to_go(1)).tolist() == [3]
    assert (retention.marked, retention.idle) == (3, 2)


def test_a_tenant_displaces_its_own_oldest_and_nobody_elses() -> None:
    retention = Retention(16, 8, 4)
    marked(retention, "a", slots(0, 1, 2))
    marked(retention, "b", slots(4, 5, 6, 7))
    retention.expire(10.0)
    assert marked(retention, "a", slots(10, 11, 12)) == [0, 1]
    assert retention.is_marked(slots(2, 4, 5, 6, 7, 10, 11, 12)).all()
    assert marked(retention, "c", slots(13)) == []
    assert not retention.is_marked(slots(13)).any()
    assert retention.refused == 1


def test_the_head_of_a_prefix_that_is_too_long_is_kept() -> None:
    retention = Retention(16, 4, 4)
    assert marked(retention, None, slots(*range(10))) == []
    assert retention.is_marked(slots(*range(10))).tolist() == [True] * 4 + [False] * 6


def test_a_shorter_time_neither_shortens_nor_displaces_a_longer_one() -> None:
    retention = Retention(8, 2, 2)
    marked(retention, None, slots(0, 1), ttl_s=3600)
    retention.use(slots(0))
    assert marked(retention, None, slots(0), ttl_s=300) == []
    assert marked(retention, None, slots(2), ttl_s=300) == []
    assert retention.expire(3599).tolist() == []
    assert retention.expire(3600).tolist() == [1, 0]


def test_each_use_begins_the_time_anew() -> None:
    retention = Retention(8, 8, 8)
    marked(retention, None, slots(0, 1))
    retention.expire(200.0)
    assert retention.use(slots(1, 5)).tolist() == [5]
    assert retention.expire(400.0).tolist() == [0]  # no time passes for a block in use
    retention.wait(slots(1))
    assert retention.expire(699.0).tolist() == []
    assert retention.expire(700.0).tolist() == [1]
    assert retention.marked == 0


def test_nothing_is_remembered_of_tenants_without_marks() -> None:
    retention = Retention(4, 4, 4)
    for number in range(100):
        marked(retention, f"tenant {number}", slots(number % 4))
        retention.end(slots(number % 4))
    retention.check()
    assert retention.marked == len(retention._tenants) == len(retention._names) == 0


def test_without_a_limit_nothing_is_marked() -> None:
    retention = Retention(4)
    assert retention.mark(slots(0, 1), None, TTL_S).size == 0
    assert retention.end(slots(0)).size == 0
    assert retention.expire(1e9).size == 0
