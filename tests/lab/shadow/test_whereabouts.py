"""Requests are located by the replica that stores their last block."""

from lab.shadow.placing import MAX_SOUGHT, WITHIN_S, Record, Whereabouts
from tests.lab.shadow.records import record

NAMES = ["a", "b", "c"]


class Caches:
    """The holders of each block, as the index would have them."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self.whereabouts = Whereabouts(lambda _, key: self.holders.get(key, 0), lambda slot: NAMES[slot])

    def store(self, key: int, name: str) -> None:
        self.holders[key] = self.holders.get(key, 0) | 1 << NAMES.index(name)

    def sought(self, *keys: int) -> Record:
        one = record(keys)
        self.whereabouts.seek(one, 0.0)
        return one


def found(one: Record) -> tuple[str, str | None] | None:
    return None if one.replica is None else (one.replica, one.source)


def test_the_replica_that_stores_the_last_block_served_it() -> None:
    caches = Caches()
    caches.store(1, "a")
    one = caches.sought(1, 2)
    caches.whereabouts.settle(1.0)
    assert found(one) is None
    caches.store(2, "b")
    caches.whereabouts.settle(2.0)
    assert found(one) == ("b", "stored")


def test_equal_prompts_at_two_replicas_are_told_apart() -> None:
    caches = Caches()
    first, second, third = (caches.sought(7) for _ in range(3))
    caches.store(7, "c")
    caches.whereabouts.settle(1.0)
    caches.store(7, "a")
    caches.whereabouts.settle(2.0)
    assert (first.replica, second.replica, third.replica) == ("c", "a", None)
    caches.whereabouts.settle(WITHIN_S)
    assert third.source == "one of several"


def test_a_prompt_that_was_cached_at_one_replica_went_there_unless_another_stores_it() -> None:
    caches = Caches()
    caches.store(7, "c")
    one = caches.sought(7)
    caches.whereabouts.settle(WITHIN_S - 1)
    assert found(one) is None
    caches.whereabouts.settle(WITHIN_S)
    assert found(one) == ("c", "held")


def test_nothing_is_guessed_of_a_prompt_that_nobody_stores() -> None:
    caches = Caches()
    one, short = caches.sought(7), caches.sought()
    caches.whereabouts.end()
    assert one.replica is None
    assert short.replica is None
    assert len(caches.whereabouts) == 0


def test_a_later_request_is_not_given_what_an_earlier_one_stored() -> None:
    caches = Caches()
    first = caches.sought(7)
    caches.store(7, "a")
    later = caches.sought(7)
    caches.whereabouts.settle(1.0)
    caches.whereabouts.settle(1.1)
    assert (first.replica, later.replica) == ("a", None)


def test_only_so_many_are_sought_at_once() -> None:
    caches = Caches()
    for key in range(MAX_SOUGHT + 5):
        caches.sought(key)
    assert len(caches.whereabouts) == MAX_SOUGHT
