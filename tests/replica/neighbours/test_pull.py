"""Pulls between a real source and a real reader over loopback."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from replica.neighbours.messages import LEASE_S
from replica.neighbours.reader import HURRY_S
from tests.events.processes import wait_until
from tests.replica.engines import chain
from tests.replica.neighbours.replicas import ArrayMemory, ServingEngine, came, pull, reading, tokens_of, wanted

SOON_S = 15.0


@contextmanager
def serving(*prompts: int, num_blocks: int = 256, **options: Any) -> Iterator[ServingEngine]:
    """Run a source that has served a prompt of so many blocks for each number."""
    engine = ServingEngine(num_blocks, **options)
    try:
        for number, blocks in enumerate(prompts):
            engine.serve(chain([*tokens_of(blocks, 1000 * number), 1]))
        yield engine
    finally:
        engine.close()


def soon() -> float:
    return time.monotonic() + SOON_S


def test_the_wanted_blocks_come_as_the_source_has_them() -> None:
    memory, want = ArrayMemory(32), wanted(8)
    targets = [7, 3, 30, 11, 2, 9, 1, 20]
    with serving(8) as engine, reading(memory) as own:
        assert pull(own, engine.source.endpoint, want, targets, soon()) == 8
        assert came(memory, want, targets, 8)
        assert (own.counts.blocks, own.counts.bytes) == (8, 8 * memory.block_bytes)
        assert not own.counts.failures


def test_the_caller_may_pause_after_each_block() -> None:
    given: list[tuple[float, float]] = []

    def give_way(took_s: float, most_s: float) -> None:
        given.append((took_s, most_s))

    with serving(8) as engine, reading(ArrayMemory(8)) as own:
        assert pull(own, engine.source.endpoint, wanted(8), range(8), soon(), give_way=give_way) == 8
    assert all(0 < took_s < SOON_S for took_s, _ in given)
    room_s = min(SOON_S, LEASE_S) - HURRY_S
    assert [most_s for _, most_s in given] == pytest.approx([room_s / 2 / left for left in range(7, 0, -1)], rel=0.1)


def test_a_reader_that_pauses_too_long_keeps_what_came_and_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica.neighbours.reader.LEASE_S", 0.25)
    with serving(8) as engine, reading(ArrayMemory(8)) as own:
        pausing: dict[str, Any] = {"give_way": lambda *_: time.sleep(0.1)}
        assert 0 < pull(own, engine.source.endpoint, wanted(8), range(8), soon(), **pausing) < 8
        assert pull(own, engine.source.endpoint, wanted(8), range(8), soon()) == 8
        assert own.counts.failures == {"deadline": 1}


def test_a_block_needs_the_salt_the_adapter_and_the_extra_keys_as_well_as_the_tokens() -> None:
    memory = ArrayMemory(8)
    own_extras = {1: [("cat", 0)]}
    with serving() as engine, reading(memory) as own:
        engine.serve(chain([*tokens_of(4), 1], cache_salt="theirs", lora_name="sql", extras=own_extras))
        others: list[dict[str, Any]] = [
            {},
            {"cache_salt": "mine", "lora_name": "sql", "extras": own_extras},
            {"cache_salt": "theirs", "extras": own_extras},
        ]
        for other in others:
            assert pull(own, engine.source.endpoint, wanted(4, **other), range(4), soon()) == 0
        without_extras = wanted(4, cache_salt="theirs", lora_name="sql")
        assert pull(own, engine.source.endpoint, without_extras, range(4), soon()) == 1
        same = wanted(4, cache_salt="theirs", lora_name="sql", extras=own_extras)
        assert pull(own, engine.source.endpoint, same, range(4), soon()) == 4
        assert came(memory, same, range(4), 4)


def test_a_source_that_restarts_is_read_over_a_new_connection() -> None:
    memory = ArrayMemory(8)
    with reading(memory) as own:
        with serving(8) as engine:
            endpoint = engine.source.endpoint
            assert pull(own, endpoint, wanted(8), range(8), soon()) == 8
        port = endpoint.rpartition(":")[2]
        with serving(4) as engine:
            moved = engine.source.endpoint
            assert pull(own, endpoint, wanted(8), range(8), soon()) == 0, f"nobody is at {port}"
            assert own.counts.failures == {"unreachable": 1}
            assert pull(own, moved, wanted(8), range(8), soon()) == 4


@pytest.mark.parametrize(
    ("changed", "reason", "at_source"),
    [
        ({"secret": b"the secret of another fleet"}, "handshake", "proof"),
        ({"kv_layout": "layout-2"}, "refused", "layout"),
        ({"model": "another"}, "refused", "model"),
    ],
)
def test_a_stranger_reads_nothing(changed: dict[str, Any], reason: str, at_source: str) -> None:
    memory = ArrayMemory(8)
    with serving(8) as engine, reading(memory, **changed) as own:
        assert pull(own, engine.source.endpoint, wanted(8), range(8), soon()) == 0
        assert own.counts.failures == {reason: 1}
        wait_until(lambda: engine.source.counts.failures == {at_source: 1}, "the source has counted it")
        assert not memory.rows.any()


def test_a_pull_ends_at_its_deadline() -> None:
    memory = ArrayMemory(8)
    with serving(8) as engine, reading(memory) as own:
        released = threading.Event()
        engine.memory.on_read = lambda _: released.wait(SOON_S)
        began_s = time.monotonic()
        assert pull(own, engine.source.endpoint, wanted(8), range(8), began_s + 0.2) == 0
        assert time.monotonic() - began_s < SOON_S / 2
        assert own.counts.failures == {"deadline": 1}
        released.set()


def test_a_pull_is_cancelled_by_another_thread() -> None:
    memory = ArrayMemory(8)
    with serving(8) as engine, reading(memory) as own:
        asked, released = threading.Event(), threading.Event()

        def stop_here(_: int) -> None:
            asked.set()
            released.wait(SOON_S)

        engine.memory.on_read = stop_here

        def cancel() -> None:
            asked.wait(SOON_S)
            own.stop()

        canceller = threading.Thread(target=cancel)
        canceller.start()
        assert pull(own, engine.source.endpoint, wanted(8), range(8), soon()) == 0
        canceller.join()
        assert own.counts.failures == {"cancelled": 1}
        assert pull(own, engine.source.endpoint, wanted(8), range(8), soon()) == 0, "and later ones end at once"
        assert own.counts.failures == {"cancelled": 2}, "the peer has done nothing wrong"
        released.set()


def test_held_blocks_stay_as_they_were_while_the_pool_evicts() -> None:
    memory, want = ArrayMemory(8), wanted(8)
    with serving(8, num_blocks=16, share=1.0) as engine, reading(memory) as own:
        reads = iter(range(100))

        def evict_at_the_second(_: int) -> None:
            if next(reads) == 1:  # on the source's thread, in place of the engine, which is idle
                taken = engine.pool.take((), engine.pool.free)
                assert taken is not None and len(taken) == 8, "only blocks that nobody reads are free"
                for block in taken:
                    engine.memory.rows[block] = 255
                engine.pool.release(taken)

        engine.memory.on_read = evict_at_the_second
        assert pull(own, engine.source.endpoint, want, range(8), soon()) == 8
        assert came(memory, want, range(8), 8)


def test_readers_take_turns_and_one_that_waits_too_long_is_told() -> None:
    memory = ArrayMemory(8)
    with serving(8, streams=1, turn_s=0.05) as engine, reading(memory) as first, reading(ArrayMemory(8)) as second:
        reading_now, released = threading.Event(), threading.Event()

        def stop_here(_: int) -> None:
            reading_now.set()
            released.wait(SOON_S)

        engine.memory.on_read = stop_here
        counts: list[int] = []
        pulls = threading.Thread(
            target=lambda: counts.append(pull(first, engine.source.endpoint, wanted(8), range(8), soon()))
        )
        pulls.start()
        assert reading_now.wait(SOON_S)
        assert pull(second, engine.source.endpoint, wanted(8), range(8), soon()) == 0
        released.set()
        pulls.join()
        assert counts == [8]
        assert engine.source.counts.failures == {"busy": 1}
        assert not second.counts.failures, "the source may be asked again at once"


def test_an_engine_that_does_not_answer_holds_nothing_afterwards() -> None:
    """The reader's time ends while the engine is in a long step; the engine then finds that nobody waits."""
    memory = ArrayMemory(8)
    with serving(8) as engine, reading(memory) as own:
        with engine.paused():
            assert pull(own, engine.source.endpoint, wanted(8), range(8), time.monotonic() + 0.2) == 0
        assert own.counts.failures == {"deadline": 1}
        wait_until(lambda: not engine.source.readers, "the stream has ended")
        wait_until(lambda: not engine.holds.references, "nothing is held")
