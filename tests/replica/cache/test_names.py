"""The table of names against a dict, with so few slots and keys that buckets are shared and keys come again."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from replica.cache.names import NOBODY, Names

SLOTS = 24
KEYS = st.integers(0, 40) | st.integers(2**64 - 40, 2**64 - 1)


class NamesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.names = Names(SLOTS)
        self.held: dict[int, int] = {}

    def free_slots(self) -> list[int]:
        return [slot for slot in range(SLOTS) if slot not in self.held.values()]

    @rule(key=KEYS)
    def add_one(self, key: int) -> None:
        free = self.free_slots()
        if free and key not in self.held:
            self.names.add(key, free[0])
            self.held[key] = free[0]

    @rule(keys=st.lists(KEYS, min_size=1, max_size=12))
    def add_many(self, keys: list[int]) -> None:
        free = self.free_slots()[: len(keys)]
        keys = keys[: len(free)]
        if not keys:
            return
        added = self.names.add_many(np.array(keys, np.uint64), np.array(free, np.intp))
        assert added == (len(set(keys)) == len(keys) and self.held.keys().isdisjoint(keys))
        if added:
            self.held |= dict(zip(keys, free, strict=True))

    @rule(which=st.integers(0, SLOTS))
    def remove_one(self, which: int) -> None:
        if self.held:
            key = sorted(self.held)[which % len(self.held)]
            self.names.remove(self.held.pop(key))

    @rule(chosen=st.sets(st.integers(0, SLOTS), min_size=1))
    def remove_many(self, chosen: set[int]) -> None:
        keys = [key for key, slot in self.held.items() if slot in chosen]
        self.names.remove_many(np.array([self.held.pop(key) for key in keys], np.intp))

    @rule()
    def clear(self) -> None:
        self.names.clear()
        self.held.clear()

    @invariant()
    def agrees_with_the_dict(self) -> None:
        asked = [*range(41), *range(2**64 - 40, 2**64)]
        expected = [self.held.get(key, NOBODY) for key in asked]
        assert self.names.find_many(np.array(asked, np.uint64)).tolist() == expected
        assert [self.names.find(key) for key in asked] == expected
        assert sorted(self.names.slots().tolist()) == sorted(self.held.values())


TestNames = NamesMachine.TestCase


def test_keys_of_one_bucket_are_all_found() -> None:
    names = Names(SLOTS)
    bucket = names._bucket(0)
    crowd = [key for key in range(100_000) if names._bucket(key) == bucket][:SLOTS]
    assert names.add_many(np.array(crowd, np.uint64), np.arange(len(crowd)))
    assert [names.find(key) for key in crowd] == list(range(len(crowd)))
    names.remove_many(np.arange(0, len(crowd), 2))
    assert [names.find(key) for key in crowd] == [NOBODY if slot % 2 == 0 else slot for slot in range(len(crowd))]
