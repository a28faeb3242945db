"""Entries that count until events confirm them or their deadline passes."""

from router.placement.holders import Optimistic


def kept(optimistic: Optimistic) -> dict[int, int]:
    optimistic.check()
    return optimistic.holders.masks


def test_withdrawn_keys_are_gone_unless_added_again() -> None:
    optimistic = Optimistic()
    first = optimistic.add(0, [10, 11], 5.0)
    optimistic.add(1, [10, 11], 6.0)
    again = optimistic.add(0, [10], 8.0)
    optimistic.withdraw(0, [10, 11], first)
    optimistic.withdraw(2, [10], first)
    assert kept(optimistic) == {10: 3, 11: 2}
    optimistic.withdraw(0, [10, 11], again)
    assert kept(optimistic) == {10: 2, 11: 2}


def test_what_was_added_again_stays_though_it_is_waited_for_less_long() -> None:
    """The second prompt's prefix is on its way already, so it expects to have its turn sooner."""
    optimistic = Optimistic()
    first = optimistic.add(0, [10, 11], 90.0)
    optimistic.add(0, [10], 60.0)
    optimistic.withdraw(0, [10, 11], first)
    assert kept(optimistic) == {10: 1}
    optimistic.expire(61.0)
    assert kept(optimistic) == {10: 1}  # the first one's deadline is kept
    optimistic.expire(90.0)
    assert kept(optimistic) == {}


def test_what_is_confirmed_or_expired_leaves_nothing_behind() -> None:
    optimistic = Optimistic()
    for now in range(1000):
        optimistic.add(now % 3, [now, now + 1], now + 10.0)
        optimistic.confirm(now % 3, [now])
        optimistic.expire(float(now))
    assert len(optimistic._due) <= 11
    optimistic.expire(2000.0)
    assert (kept(optimistic), optimistic._due, optimistic._entries) == ({}, [], {})
