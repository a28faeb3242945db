"""Engines whose blocks are moved by real threads, in arrays, host memory and a file."""

import os
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Barrier, Event
from time import monotonic

import numpy as np
import numpy.typing as npt
import pytest

from replica.cache.chain import Chain
from replica.cache.lower import DISK, HOST
from replica.cache.moves import GiveWay, Load, Pull, Save, Transfer, Write
from replica.config import EngineConfig, SimulatedConfig
from replica.disk.file import DiskFile, open_disk_file
from replica.disk.record import Record
from replica.engine.engine import Engine
from replica.runners.runner import ArrayMemory
from replica.tiers.mover import PARTS, HostMemory, Mover
from tests.events.processes import wait_until
from tests.replica.ahead import AheadRunner
from tests.replica.engine.test_scheduler_property import EOS, SAME, answer
from tests.replica.engines import MODEL, SIZE, RememberingRunner, submit
from tests.replica.tiers.simulated import VirtualClock

BLOCKS, SLOTS, ON_DISK = 12, 10, 40
LAYERS = 3
BLOCK_BYTES = LAYERS * 2 * SIZE * 8
DEADLINE_S = 30.0


class ArrayKV(MutableMapping[tuple[int, int], int]):
    """A runner's values in an array like a model's, once in each layer: a block that is half moved has none."""

    def __init__(self, num_blocks: int) -> None:
        self.bytes = np.zeros((LAYERS, 2, num_blocks, SIZE * 8), np.uint8)
        self.tokens = self.bytes.view(np.int64)

    def __getitem__(self, place: tuple[int, int]) -> int:
        found = set(self.tokens[:, :, place[0], place[1]].reshape(-1).tolist())
        if len(found) > 1 or 0 in found:
            raise KeyError(place)
        return int(found.pop())

    def __setitem__(self, place: tuple[int, int], value: int) -> None:
        self.tokens[:, :, place[0], place[1]] = value

    def __delitem__(self, place: tuple[int, int]) -> None:
        self.tokens[:, :, place[0], place[1]] = 0

    def __ior__(self, other: Iterable[tuple[tuple[int, int], int]]) -> "ArrayKV":
        self.update(other)
        return self

    def __iter__(self) -> Iterator[tuple[int, int]]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def disk_file(folder: Path) -> DiskFile:
    return open_disk_file(folder, kv_layout="x", block_size=SIZE, payload_bytes=BLOCK_BYTES, num_slots=ON_DISK)


class LikeADevices(ArrayMemory):
    """Memory whose blocks a mover moves in parts, some at once."""

    is_host = False


@contextmanager
def serving(
    runner_type: type[RememberingRunner], folder: Path, memory: type[ArrayMemory] = ArrayMemory
) -> Iterator[Engine]:
    config = EngineConfig(
        model=MODEL,
        engine="simulated",
        block_size=SIZE,
        num_blocks=BLOCKS,
        host_blocks=SLOTS,
        disk_blocks=ON_DISK,
        max_num_seqs=4,
        max_num_batched_tokens=20,
        max_waiting=50,
        **SAME | {"simulated": SimulatedConfig(mean_output_tokens=8, prefill_tokens_per_s=1.0)},  # loading pays off
    )
    clock = VirtualClock()
    runner = runner_type(config.simulated, clock, config.vocabulary, config.eos_token_ids)
    kv = runner.kv = ArrayKV(BLOCKS)  # type: ignore[assignment]
    mover = Mover(memory(kv.bytes), HostMemory(SLOTS, BLOCK_BYTES), BLOCKS, disk_file(folder))
    try:
        yield Engine(config, runner, clock, mover)
    finally:
        mover.close()


class Visitor:
    """Asks about a few documents, again and again, and compares the answers; now and then it does not wait for one."""

    def __init__(self, engine: Engine, chance: Random) -> None:
        self.engine = engine
        self.chance = chance
        self.left: dict[int, list[int]] = {}
        self.count = 0

    def ask(self) -> None:
        chance = self.chance
        prompt = [chance.randrange(3, 8)] * chance.randrange(6, 18)
        self.count += 1
        self.left[self.count] = list(answer(tuple(prompt), 4, 0))
        assert submit(self.engine, self.count, prompt, 4, seed=0, stop_token_ids=(EOS,)) is None

    def step(self) -> None:
        for output in self.engine.step():
            left = self.left[output.id]
            assert output.token_ids == left[: len(output.token_ids)]
            del left[: len(output.token_ids)]
            if output.finish_reason:
                assert not self.left.pop(output.id)
        self.engine.check()

    def visit(self, questions: int) -> None:
        deadline_s = monotonic() + DEADLINE_S
        while self.count < questions or self.engine.busy:
            assert monotonic() < deadline_s, f"{self.left.keys()} have no answer"
            if self.count < questions and len(self.left) < 6 and self.chance.random() < 0.7:
                self.ask()
            if self.left and self.chance.random() < 0.05:
                number = self.chance.choice(list(self.left))
                assert self.engine.cancel(number)
                del self.left[number]
            self.step()
        assert not self.left

    def leave(self) -> None:
        """Wait until nothing moves, and see that nothing is held."""
        lower, deadline_s = self.engine.pool.lower, monotonic() + DEADLINE_S
        assert lower is not None
        self.engine.settle()
        while lower.writing:
            assert monotonic() < deadline_s
            self.engine.settle()
        self.engine.check()
        assert [tier.free for tier in lower.tiers] == [SLOTS, ON_DISK]
        assert self.engine.pool.free == BLOCKS


@pytest.mark.parametrize(
    ("runner_type", "memory"),
    [(RememberingRunner, ArrayMemory), (AheadRunner, ArrayMemory), (AheadRunner, LikeADevices)],
)
@pytest.mark.parametrize("seed", range(2))
def test_answers_are_right_while_threads_move_blocks(
    runner_type: type[RememberingRunner],
    memory: type[ArrayMemory],
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replica.tiers.mover.TOGETHER", 1)
    with serving(runner_type, tmp_path, memory) as engine:
        visitor = Visitor(engine, Random(seed))
        visitor.visit(150)
        visitor.leave()
        assert engine.scheduler.transfers.loaded_tokens.keys() == {HOST, DISK}


def test_answers_are_right_after_a_restart_with_a_damaged_file(tmp_path: Path) -> None:
    with serving(RememberingRunner, tmp_path) as engine:
        visitor = Visitor(engine, Random(0))
        visitor.visit(60)
        visitor.leave()
    chance = Random(1)
    (path,) = tmp_path.glob("*.blocks")
    with path.open("r+b") as file:
        for offset in chance.sample(range(0, os.path.getsize(path), 256), 400):
            file.seek(offset)
            file.write(b"\xff")
    with serving(RememberingRunner, tmp_path) as engine:
        visitor = Visitor(engine, Random(2))
        visitor.visit(60)
        visitor.leave()
        assert DISK in engine.scheduler.transfers.loaded_tokens


def test_a_reset_is_a_cold_start_also_for_what_waits_to_be_written(tmp_path: Path) -> None:
    with serving(RememberingRunner, tmp_path) as engine:
        visitor = Visitor(engine, Random(0))
        visitor.visit(30)
        visitor.leave()
        for seed in range(3, 8):
            assert submit(engine, 100 + seed, [seed] * 17, 4, seed=0) is None
        while engine.busy:
            engine.step()
        assert engine.mover is not None and engine.mover.disk_counters.written
        assert engine.reset()
    with disk_file(tmp_path) as reopened:
        assert not reopened.recover().records
    with serving(RememberingRunner, tmp_path) as engine:
        visitor = Visitor(engine, Random(1))
        visitor.visit(30)
        visitor.leave()


# ---- what cannot be read


class Failing(ArrayMemory):
    """Cannot read the first block."""

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        if 0 in blocks:
            raise OSError("the device has fallen off the bus")
        super().read(blocks, into)


def test_a_block_that_could_not_be_saved_is_lost_to_all_who_want_it(tmp_path: Path) -> None:
    disk = disk_file(tmp_path)
    mover = Mover(Failing(ArrayKV(BLOCKS).bytes), HostMemory(SLOTS, BLOCK_BYTES), BLOCKS, disk)
    bad, good, never, on_disk = BLOCKS, BLOCKS + 1, BLOCKS + 2, BLOCKS + SLOTS
    transfers: list[Transfer] = []
    mover.begin(Transfer([Save(0, bad), Save(2, never)], []))
    mover.begin(Transfer([Save(1, good)], [Load(good, 3, HOST), Load(bad, 4, HOST), Load(good, 5, HOST)]))
    wait_until(lambda: transfers.extend(mover.landed()[0]) or len(transfers) == 2)  # type: ignore[func-returns-value]
    first, second = transfers
    assert first.lost == [bad, never]
    assert (second.came, second.lost) == (1, [bad])
    record = Record(1, 1, 0, bytes(4 * SIZE))
    mover.write([Write(bad, on_disk, record), Write(good, on_disk + 1, record)])
    done: list[bool] = []
    wait_until(lambda: done.extend(each.done for each in mover.landed()[1]) or len(done) == 2)  # type: ignore[func-returns-value]
    assert done == [False, True]
    mover.save([Save(5, bad)])
    mover.begin(Transfer([], [Load(bad, 6, HOST)]))
    wait_until(lambda: transfers.extend(mover.landed()[0]) or len(transfers) == 3)  # type: ignore[func-returns-value]
    assert transfers[-1].came == 1
    mover.close()


def slow_pull(pull: Pull, give_way: GiveWay) -> int:
    """A neighbour's blocks come, and each takes a millisecond of the processor's time."""
    for _ in pull.blocks:
        give_way(0.001, 0.5)
        give_way(0.1, 0.5)
    return len(pull.blocks)


@pytest.mark.parametrize(("is_host", "computing", "gives_way"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_loads_and_pulls_give_way_to_steps_that_wait_for_the_same_memory(
    is_host: bool, computing: bool, gives_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr("replica.tiers.mover.sleep", pauses_s.append)
    memory = ArrayMemory(ArrayKV(BLOCKS).bytes)
    monkeypatch.setattr(memory, "is_host", bool(is_host), raising=False)
    mover = Mover(memory, HostMemory(SLOTS, BLOCK_BYTES), BLOCKS, pull=slow_pull)
    mover.computing = bool(computing)
    pull = Pull("tcp://127.0.0.1:1", Chain([1] * (3 * SIZE + 1), SIZE, MODEL), 2, [3], patience_s=1.0)
    mover.begin(Transfer([Save(0, BLOCKS)], [Load(BLOCKS, 1, HOST), Load(BLOCKS, 2, HOST)], pull))
    wait_until(lambda: bool(mover.landed()[0]))
    assert [pause_s > 0 for pause_s in pauses_s] == [True, True, True, True] * gives_way
    assert not gives_way or pauses_s[2:] == pytest.approx([0.019, 0.5])
    mover.close()


def test_loads_do_not_give_way_to_the_last_step_of_all() -> None:
    mover = Mover(ArrayMemory(ArrayKV(BLOCKS).bytes), HostMemory(SLOTS, BLOCK_BYTES), BLOCKS)
    mover.computing = True
    mover.close()
    assert not mover.computing


class EagerMemory(ArrayMemory):
    """Saves only once something was loaded, or after a while."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        super().__init__(array)
        self.loaded = Event()

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        self.loaded.wait(0.1)
        super().read(blocks, into)

    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        self.loaded.set()
        super().write(blocks, payloads)


def test_a_load_waits_for_the_saves_of_what_it_reads_and_overwrites() -> None:
    array = ArrayKV(BLOCKS).bytes
    array[:, :, 1], array[:, :, 2] = 11, 22
    mover = Mover(EagerMemory(array), HostMemory(SLOTS, BLOCK_BYTES), BLOCKS)
    mover.begin(Transfer([Save(1, BLOCKS), Save(2, BLOCKS + 1)], [Load(BLOCKS, 3, HOST), Load(BLOCKS + 1, 2, HOST)]))
    wait_until(lambda: bool(mover.landed()[0]))
    assert (array[:, :, 3] == 11).all() and (array[:, :, 2] == 22).all()
    mover.close()


class Meeting(LikeADevices):
    """Copies once as many parts as go at once have come, or fails after a while."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        super().__init__(array)
        self._reads, self._writes = (Barrier(PARTS, timeout=DEADLINE_S) for _ in range(2))

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        self._reads.wait()
        super().read(blocks, into)

    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        self._writes.wait()
        super().write(blocks, payloads)


def test_a_device_gets_the_next_blocks_while_others_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica.tiers.mover.TOGETHER", 1)
    array = ArrayKV(BLOCKS).bytes
    array[:, :, 1], array[:, :, 2] = 11, 22
    mover = Mover(Meeting(array), HostMemory(SLOTS, BLOCK_BYTES), BLOCKS)
    transfer = Transfer([Save(1, BLOCKS), Save(2, BLOCKS + 1)], [Load(BLOCKS, 3, HOST), Load(BLOCKS + 1, 4, HOST)])
    mover.begin(transfer)
    wait_until(lambda: bool(mover.landed()[0]))
    assert (transfer.came, transfer.lost) == (2, [])
    assert (array[:, :, 3] == 11).all() and (array[:, :, 4] == 22).all()
    mover.close()


class Slow(LikeADevices):
    """Reads block 1 only after block 2, or after a while."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        super().__init__(array)
        self._second = Event()

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        if 1 in blocks:
            self._second.wait(0.1)
        super().read(blocks, into)
        self._second.set()
