"""Engines with lower media against the dumb model of those without: blocks move at any time, and moves fail.

The runner compares what a request reads with what it should have written, so a block that came back with other values,
or too late, cannot hide behind right tokens.
"""

from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from events.cache.resolver import Resolver
from events.mirror import Mirror
from replica.cache.lower import DISK, HOST
from replica.cache.moves import PULLED, Transfer
from replica.engine.engine import Engine
from replica.engine.scheduler import Batch
from replica.messages import KVSource
from replica.runners.request import Request
from replica.tiers.transfers import Transfers
from tests.replica.careless import run_careless
from tests.replica.engine.test_scheduler_property import MODEL_LEN, SAME, StrictRunner, World, indices, prompts
from tests.replica.engines import MODEL
from tests.replica.test_ahead_property import StrictAheadRunner
from tests.replica.tiers.movers import Erasure, Watched, tiered_engine


class WatchedRunner(Watched, StrictRunner):
    pass


class WatchedAheadRunner(Watched, StrictAheadRunner):
    pass


class TieredWorld(World):
    watched_type: type[Watched] = WatchedRunner

    @initialize(
        room=st.integers(18, 40),
        size=st.integers(1, 4),
        seqs=st.integers(1, 5),
        spare=st.integers(0, 30),
        waiting=st.integers(2, 8),
        partial=st.booleans(),
        host=st.integers(1, 24),
        disk=st.sampled_from([0, 5, 40]),
        seed=st.integers(0, 2**32),
        slow=st.sampled_from([None, None, None, HOST, DISK, PULLED]),
    )
    def begin(
        self,
        room: int,
        size: int,
        seqs: int,
        spare: int,
        waiting: int,
        partial: bool,
        host: int,
        disk: int,
        seed: int,
        slow: str | None,
    ) -> None:
        num_blocks = -(-room // size)
        self.engine, self.mover = tiered_engine(
            self.watched_type,
            Random(seed),
            num_blocks=num_blocks,
            block_size=size,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + spare,
            max_waiting=waiting,
            enable_partial_reuse=partial,
            host_blocks=host,
            disk_blocks=disk,
            **SAME,
        )
        runner = self.mover.runner
        assert isinstance(runner, StrictRunner)
        runner.budget, runner.seqs = seqs + spare, seqs
        if slow is not None:
            self.mover.speeds.add(slow, 1, 1e9)
        self.expected = {}
        self.past = []
        self.resolver = Resolver(MODEL, native=True)
        self.mirror = Mirror()
        self.count = 0
        self.generated = 0

    @rule(
        prompt=prompts,
        more=prompts,
        max_tokens=st.integers(1, 10),
        tokens=st.lists(st.integers(1, 30), min_size=1, max_size=2),
    )
    def one_comes_that_neighbours_know(
        self, prompt: list[int], more: list[int], max_tokens: int, tokens: list[int]
    ) -> None:
        sources = [KVSource(f"tcp://{number}", count) for number, count in enumerate(tokens)]
        self.send([*prompt, *more][: MODEL_LEN - 2], max_tokens, sources=sources)

    @rule(
        documents=st.lists(st.tuples(st.integers(3, 6), st.integers(4, 16)), min_size=1, max_size=5),
        question=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.integers(1, 4),
        steps=st.integers(0, 8),
    )
    def they_ask_about_documents(
        self, documents: list[tuple[int, int]], question: list[int], max_tokens: int, steps: int
    ) -> None:
        """There are a few of these, too long for all to stay in the pool."""
        for document, length in documents:
            self.send([*[document] * length, *question], max_tokens)
        self.step(steps)

    @rule(moves=st.integers(1, 20))
    def blocks_move(self, moves: int) -> None:
        for _ in range(moves):
            self.mover.move()

    @rule()
    def settle(self) -> None:
        """Do what a replica without requests does."""
        if not self.engine.busy:
            self.engine.settle()
            self.verify()

    @precondition(lambda self: self.mover.disk)
    @rule(which=indices)
    def the_disk_turns_bits(self, which: int) -> None:
        self.mover.damage(which)

    def progress(self) -> tuple[object, ...]:
        loading = [request.id for request in self.engine.scheduler.transfers.requests]
        return *super().progress(), self.mover.moved, loading

    def verify(self) -> None:
        events = self.engine.take_events()
        self.engine.check()
        self.mirror.apply(events)
        self.resolver.apply(events)
        self.resolver.check()
        assert self.resolver.lost is None
        assert self.resolver.keys() == self.engine.pool.resident()
        lower = self.engine.pool.lower
        assert lower is not None
        for tier in lower.tiers:
            assert self.resolver.keys(tier.medium) == tier.resident()
        assert self.resolver.digest() == self.mirror.digest()
        self.verify_disk()
        assert self.engine.scheduler.requests.keys() == self.expected.keys()

    def verify_disk(self) -> None:
        """Verify that all named slots have been written, and stay as they are."""
        lower = self.engine.pool.lower
        assert lower is not None
        if lower.disk is None:
            return
        slots = lower.disk.slots()
        for slot, key in zip(slots.tolist(), lower.disk.keys(slots).tolist(), strict=True):
            assert self.mover.disk[slot].record.key == key, f"slot {slot} has another block than its name says"
            assert Erasure(slot) not in self.mover.writing, f"slot {slot} is named, and will be erased"

    def teardown(self) -> None:
        """Also see that nothing stays held, and that what is left can be used."""
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.busy:
                break
            self.one_step()
        assert not self.engine.busy, "a request starved"
        lower = self.engine.pool.lower
        assert lower is not None
        self.engine.settle()  # saves what was named last
        while self.mover.busy:
            self.engine.settle()
        self.engine.settle()
        assert lower.writing == 0
        for tier in lower.tiers:
            assert tier.free == tier.num_slots, f"{tier.medium}: slots stay held"
        super().teardown()


class TieredAheadWorld(TieredWorld):
    watched_type = WatchedAheadRunner

    @rule(prompt=prompts, max_tokens=st.integers(1, 14), seed=st.integers(0, 1))
    def a_penalized_one_arrives(self, prompt: list[int], max_tokens: int, seed: int) -> None:
        self.send(prompt, max_tokens, seed, frequency_penalty=0.5)


TestTieredEngine = TieredWorld.TestCase
TestTieredAheadEngine = TieredAheadWorld.TestCase


# ---- negative controls


def believing(transfers: Transfers, transfer: Transfer) -> Request:
    """Take for granted that all has come."""
    transfer.came = len(transfer.loads)
    return LAND(transfers, transfer)


def eager(engine: Engine, batch: Batch) -> None:
    """Load into blocks that a step which flies may use."""
    BEGIN_MOVES(engine, batch)
    while engine._due and engine.mover is not None:
        engine.mover.begin(engine._due.popleft())


LAND, BEGIN_MOVES = Transfers.land, Engine._begin_moves


@pytest.mark.parametrize(
    ("world", "owner", "name", "careless"),
    [
        (TieredWorld, Transfers, "land", believing),
        pytest.param(TieredAheadWorld, Engine, "_begin_moves", eager, marks=pytest.mark.grid),
    ],
)
def test_the_property_fails_without_a_precaution(
    monkeypatch: pytest.MonkeyPatch, world: type[TieredWorld], owner: type, name: str, careless: object
) -> None:
    monkeypatch.setattr(owner, name, careless)
    with pytest.raises(AssertionError):
        run_careless(world)
