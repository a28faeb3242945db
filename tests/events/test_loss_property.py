"""An engine's block pool behind a wire that loses batches for good: claims are never too high, and recover."""

import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from events.blocks import block_keys, root_key
from events.cache.changes import Change, Cleared, Removed
from events.cache.resolver import Resolver
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KnownEvent, encode_batch
from events.stream.foreign_stream import ForeignStream
from events.stream.states import StreamConfig
from events.view import CacheView

ROOT = root_key("", None, None, 1)
NUMBERS = range(14)
NEW = 100  # from here on, numbers that nothing else stores
KEYS = {number: block_keys([number], 1, ROOT)[0] for number in NUMBERS}


def hash_of(number: int) -> int:
    return 1000 + number


class DumbPool:
    """Blocks, each with the number stored in it; None: nothing that a request could find."""

    def __init__(self, blocks: int, rng: random.Random) -> None:
        self.blocks: list[int | None] = [None] * blocks
        self.events: list[KnownEvent] = []
        self._rng = rng

    def take(self) -> int:
        """Empty a block for another use."""
        empty = [place for place, number in enumerate(self.blocks) if number is None]
        place = self._rng.choice(empty or range(len(self.blocks)))
        self.empty(place)
        return place

    def empty(self, place: int) -> None:
        if (number := self.blocks[place]) is not None:
            self.events.append(BlockRemoved([hash_of(number)], "GPU"))
            self.blocks[place] = None

    def store(self, number: int, place: int | None = None) -> None:
        """Store it, even where it is stored already, as for two requests at once."""
        self.blocks[self.take() if place is None else place] = number
        self.events.append(BlockStored([hash_of(number)], None, [number], 1, None, "GPU", None))

    def clear(self) -> None:
        self.blocks = [None] * len(self.blocks)
        self.events.append(AllBlocksCleared())

    @property
    def copies(self) -> dict[int, int]:
        stored = [number for number in self.blocks if number is not None]
        return {hash_of(number): stored.count(number) for number in stored}


class Losses(RuleBasedStateMachine):
    """No replay: what is lost stays lost."""

    turnover = True

    @initialize(blocks=st.integers(1, 6), seed=st.integers(0, 2**32), late=st.integers(0, 3))
    def begin(self, blocks: int, seed: int, late: int) -> None:
        self.now_s = 1.0
        self.pool = DumbPool(blocks, random.Random(seed))
        self.wire: list[tuple[int, bytes]] = []
        self.seq = -1
        self.truth: dict[int, dict[int, int]] = {}
        self.reused: list[tuple[int, int, int, list[int]]] = []
        self.cleared = 0
        self.removed: list[int] = []  # keys, in order
        resolver = Resolver()
        resolver.capacity.limit(blocks + 1, blocks)
        stream = ForeignStream(StreamConfig(can_replay=False))
        self.view = CacheView("r", stream, resolver, on_change=self.changed)
        for number in range(late):
            self.publish([number])
        self.wire.clear()  # nobody listened yet
        self.perform_connected()

    def changed(self, change: Change) -> None:
        if isinstance(change, Removed):
            self.removed += change.keys
        elif isinstance(change, Cleared):
            self.cleared += 1

    def perform_connected(self) -> None:
        self.view.perform(self.view.stream.connected(self.now_s))

    # ---- the engine

    @rule(numbers=st.lists(st.sampled_from(NUMBERS), max_size=4))
    def publish(self, numbers: list[int]) -> None:
        """A step's stores, with the evictions for them."""
        for number in numbers:
            self.pool.store(number)
        self.send()

    @rule()
    def use_without_storing(self) -> None:
        self.pool.take()
        self.send()

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.send()

    def send(self) -> None:
        if self.pool.events:
            self.seq += 1
            batch = EventBatch(float(self.seq), [*self.pool.events])
            self.wire.append((self.seq, encode_batch(batch)))
            self.truth[self.seq] = self.pool.copies
            self.pool.events = []

    @rule()
    def reuse(self) -> None:
        """A request that begins now finds all that is resident; its answer says so later."""
        found = [number for number in NUMBERS if number in self.pool.blocks]
        since = self.cleared, len(self.removed), self.view.resolver.doubtful.unknown_removals
        self.reused.append((*since, [KEYS[number] for number in found]))

    # ---- the wire

    @precondition(lambda self: self.wire)
    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            self.view.perform(self.view.stream.live(*self.wire.pop(0), self.now_s))

    @precondition(lambda self: self.wire)
    @rule()
    def lose(self) -> None:
        self.wire.pop(0)

    @precondition(lambda self: self.view.stream.last_seq == self.seq)
    @rule()
    def answers_are_told(self) -> None:
        """Long after them: all that was published before an answer has come."""
        resolver = self.view.resolver
        for cleared, removed, unknown, keys in self.reused:
            if cleared == self.cleared:
                told = unknown == resolver.doubtful.unknown_removals and not {*self.removed[removed:]} & {*keys}
                resolver.found(keys, proved=self.is_proved(told))
        self.reused.clear()

    def is_proved(self, told: bool) -> bool:
        return told

    # ---- what must hold

    def known(self) -> dict[int, int]:
        self.view.resolver.check()
        pools = self.view.resolver.pools.values()
        named = {one: 1 + pool.copies.get(one, 0) for pool in pools for one in pool.resident}
        return named | dict.fromkeys(self.unnamed(), 1)  # type: ignore[return-value]

    def unnamed(self) -> list[int]:
        """The engine's hashes of blocks that hits have proved, and that the resolver does not know."""
        unnamed = {key for pool in self.view.resolver.pools.values() for key in pool.unnamed}
        return [hash_of(number) for number in NUMBERS if KEYS[number] in unnamed]

    @invariant()
    def claims_are_never_too_high(self) -> None:
        if not hasattr(self, "view") or self.view.stream.last_seq < 0:
            return
        truth, known = self.truth.get(self.view.stream.last_seq, {}), self.known()
        for block_hash, copies in known.items():
            assert copies <= truth.get(block_hash, 0), f"{block_hash}: {copies} of {truth}"
        if self.view.inexact is None:
            assert known == truth

    @precondition(lambda self: self.turnover)
    @rule()
    def everything_is_replaced(self) -> None:
        """New contents in every block: the view is exact again without a replay."""
        self.deliver_all()
        for place in range(len(self.pool.blocks)):
            self.pool.empty(place)
            self.pool.store(NEW + place, place)
            self.send()
        self.deliver_all()
        assert self.view.inexact is None, self.view.inexact
        assert self.known() == self.pool.copies

    @rule()
    def reuse_at_rest(self) -> None:
        """A request while nothing is on its way."""
        self.deliver_all()
        self.reuse()
        if self.view.stream.last_seq == self.seq:
            self.answers_are_told()

    def deliver_all(self) -> None:
        while self.wire:
            self.view.perform(self.view.stream.live(*self.wire.pop(0), self.now_s))


class Careless(Losses):
    """The control: a full pool is taken for a known one, counting copies as blocks."""

    turnover = False

    @initialize(blocks=st.integers(1, 6), seed=st.integers(0, 2**32), late=st.integers(0, 3))
    def begin(self, blocks: int, seed: int, late: int) -> None:
        super().begin(blocks, seed, late)
        self.view.resolver.capacity.cacheable_blocks = max(1, blocks - 1)


class Unlimited(Losses):
    """The size of the pool is not known: nothing but removals ends a claim."""

    turnover = False

    @initialize(blocks=st.integers(1, 6), seed=st.integers(0, 2**32), late=st.integers(0, 3))
    def begin(self, blocks: int, seed: int, late: int) -> None:
        super().begin(blocks, seed, late)
        self.view.resolver.capacity.limit(None)


class Credulous(Unlimited):
    """The control: what a hit has found is still there, whatever was removed since."""

    def is_proved(self, told: bool) -> bool:
        del told
        return True


EXAMPLES = settings(max_examples=max(40, settings().max_examples), stateful_step_count=40)


@pytest.mark.parametrize("machine", [Losses, Unlimited])
def test_what_is_lost_is_never_claimed_and_a_turnover_recovers_it(machine: type[Losses]) -> None:
    run_state_machine_as_test(machine, settings=EXAMPLES)


@pytest.mark.parametrize(
    "control",
    [Careless, pytest.param(Credulous, marks=pytest.mark.grid)],
)
def test_the_controls_fail(control: type[Losses]) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            control,
            settings=settings(
                max_examples=400, stateful_step_count=40, deadline=None, phases=[Phase.generate], database=None
            ),
        )
