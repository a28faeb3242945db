"""A mover of the values that a RememberingRunner keeps, one block at a time, at moments that a test chooses.

It fails when two of those who work at the same time use the same block or slot, and one of them writes it.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple, TypeAlias

from replica.cache.moves import Load, Pull, Save, Transfer, Write, Written
from replica.config import EngineConfig
from replica.disk.record import Record
from replica.engine.engine import Engine
from replica.runners.request import Scheduled
from replica.runners.runner import Finish, SampledToken
from replica.tiers.mover import Landed, LoadSpeeds
from tests.replica.engines import MODEL, SIZE, RememberingRunner, content
from tests.replica.tiers.simulated import IdleMover, VirtualClock

Values: TypeAlias = tuple[int, ...]

GPU = "GPU"
FAILS = 0.1  # of reads and writes


class Use(NamedTuple):
    """Blocks and slots that somebody reads and writes, by medium and number."""

    reads: frozenset[tuple[str, int]]
    writes: frozenset[tuple[str, int]]

    def disturbs(self, other: "Use") -> frozenset[tuple[str, int]]:
        return (self.writes & (other.reads | other.writes)) | (self.reads & other.writes)


class OnDisk(NamedTuple):
    record: Record
    values: Values
    checksum: int


def used(reads: Iterable[tuple[str, int]], writes: Iterable[tuple[str, int]]) -> Use:
    return Use(frozenset(reads), frozenset(writes))


def use_of_step(batch: Sequence[Scheduled], size: int) -> Use:
    reads, writes = set(), set()
    for request, start, count, copy in batch:
        reads |= {(GPU, block) for block in request.blocks[: -(-start // size)]}
        writes |= {(GPU, block) for block in request.blocks[start // size : -(-(start + count) // size)]}
        if copy is not None:
            reads.add((GPU, copy.source))
            writes.add((GPU, copy.target))
    return used(reads, writes)


def use_of_saves(saves: Sequence[Save]) -> Use:
    return used([(GPU, block) for block, _ in saves], [("slot", slot) for _, slot in saves])


def use_of(transfer: Transfer) -> Use:
    saves = use_of_saves(transfer.saves)
    reads = saves.reads | {("slot", load.slot) for load in transfer.loads}
    return used(reads, saves.writes | {(GPU, block) for block in transfer.blocks})


def use_of_write(write: Write) -> Use:
    return used([("slot", write.source)], [("slot", write.slot)])


class Erasure(NamedTuple):
    slot: int


class RememberingMover(IdleMover):
    """Three threads, each with moves in order: one loads, one pulls, one writes to the disk."""

    def __init__(self, runner: RememberingRunner, size: int, first_on_disk: int, chance: Random) -> None:
        self.speeds = LoadSpeeds(runner.clock.now_s)
        self.runner = runner
        self.size = size
        self.first_on_disk = first_on_disk
        self.chance = chance
        self.fails = True
        self.host: dict[int, Values] = {}
        self.disk: dict[int, OnDisk] = {}
        self.moved = 0
        self.steps: list[Use] = []
        self.begun: list[Transfer] = []  # until they are told to have landed
        self.loading: deque[tuple[Transfer, Iterator[None]]] = deque()
        self.pulling: list[Transfer] = []
        self.writing: deque[Write | Erasure] = deque()
        self._over: list[Transfer] = []
        self._ended: list[Written] = []

    # ---- what the engine asks for

    def save(self, saves: Sequence[Save]) -> None:
        self.verify("a save", use_of_saves(saves), [*self.of_steps(), *self.of_transfers(), *self.of_writes()])
        for save in saves:
            self._save(save)
        self.go_on()

    def begin(self, transfer: Transfer) -> None:
        self.verify("a transfer", use_of(transfer), [*self.of_steps(), *self.of_writes()])
        for other in self.begun:  # in order, but for the pulls
            both = used((), [(GPU, block) for block in other.blocks])
            self.verify("a transfer", use_of(transfer), [("another's load", both)])
        self.begun.append(transfer)
        self.loading.append((transfer, self._carry(transfer)))
        self.go_on()

    def write(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self.verify("a write", use_of_write(write), [*self.of_transfers(), *self.of_writes()])
            self.writing.append(write)
        self.go_on()

    def erase(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.verify("an erasure", used((), [("slot", slot)]), [*self.of_transfers(), *self.of_writes()])
            self.writing.append(Erasure(slot))
        self.go_on()

    def clear(self) -> None:
        self._ended += [Written(move, False) for move in self.writing if isinstance(move, Write)]
        self.writing.clear()
        self.disk.clear()

    def landed(self) -> Landed:
        self.go_on(at_least=1)
        landed, self._over = self._over, []
        written, self._ended = self._ended, []
        self.begun = [transfer for transfer in self.begun if transfer not in landed]
        return landed, written

    @property
    def busy(self) -> bool:
        return bool(self.begun or self.writing or self._ended)

    # ---- steps

    def step_begins(self, batch: Sequence[Scheduled]) -> Use:
        use = use_of_step(batch, self.size)
        self.verify("a step", use, self.of_transfers())
        self.steps.append(use)
        self.go_on()
        return use

    def step_ends(self, use: Use) -> None:
        self.go_on()
        self.steps.remove(use)

    # ---- nobody disturbs another

    def of_steps(self) -> list[tuple[str, Use]]:
        return [("a step", use) for use in self.steps]

    def of_transfers(self) -> list[tuple[str, Use]]:
        return [("a transfer", use_of(transfer)) for transfer in self.begun]

    def of_writes(self) -> list[tuple[str, Use]]:
        return [("a write", use_of_write(one)) for one in self.writing if isinstance(one, Write)]

    def verify(self, name: str, use: Use, others: Iterable[tuple[str, Use]]) -> None:
        for other, its in others:
            assert not use.disturbs(its), f"{name} and {other} both use {set(use.disturbs(its))}"

    # ---- moves

    def go_on(self, at_least: int = 0) -> None:
        for _ in range(max(at_least, self.chance.choice((0, 0, 1, 2, 5)))):
            self.move()

    def move(self) -> None:
        """Carry out one part of a move, of whichever thread."""
        threads = [self._load_next] * bool(self.loading) + [self._pull_next] * bool(self.pulling)
        threads += [self._write_next] * bool(self.writing)
        if threads:
            self.moved += 1
            self.chance.choice(threads)()

    def damage(self, which: int) -> None:
        """Turn bits of what the disk has."""
        if self.disk:
            slot = list(self.disk)[which % len(self.disk)]
            one = self.disk[slot]
            self.disk[slot] = one._replace(values=tuple(value + 1 for value in one.values))

    def failed(self) -> bool:
        return self.fails and self.chance.random() < FAILS

    def _load_next(self) -> None:
        transfer, rest = self.loading[0]
        if next(rest, self) is self:
            self.loading.popleft()
            if transfer.pull is not None and transfer.came == len(transfer.loads):
                self.pulling.append(transfer)
            else:
                self._over.append(transfer)

    def _carry(self, transfer: Transfer) -> Iterator[None]:
        for save in transfer.saves:
            if self.failed():
                self.host.pop(save.slot, None)
                transfer.lost.append(save.slot)
            else:
                self._save(save)
            yield
        for load in transfer.loads:
            if not self._bring(load):
                transfer.lost.append(load.slot)
                return
            transfer.came += 1
            yield

    def _pull_next(self) -> None:
        transfer = self.pulling.pop(self.chance.randrange(len(self.pulling)))
        pull = transfer.pull
        assert pull is not None
        transfer.pulled = self.chance.randint(0, len(pull.blocks))
        self._read_all(pull, transfer.pulled)
        self._over.append(transfer)

    def _read_all(self, pull: Pull, count: int) -> None:
        values = content(pull.chain, pull.chain.tokens)
        for index, block in enumerate(pull.blocks[:count], pull.start):
            self._fill(block, values[index * self.size : (index + 1) * self.size])

    def _write_next(self) -> None:
        move = self.writing.popleft()
        if isinstance(move, Erasure):
            self.disk.pop(move.slot, None)
            return
        done = move.source in self.host and not self.failed()
        if done:
            values = self.host[move.source]
            self.disk[move.slot] = OnDisk(move.record, values, hash(values))
        elif self.chance.random() < 0.5:
            self.disk.pop(move.slot, None)
        self._ended.append(Written(move, done))

    def _save(self, save: Save) -> None:
        values = [self.runner.kv.get((save.block, offset)) for offset in range(self.size)]
        assert None not in values, f"block {save.block} is saved before it is filled"
        self.host[save.slot] = tuple(value for value in values if value is not None)

    def _bring(self, load: Load) -> bool:
        if load.record is None:
            if load.slot in self.host:
                self._fill(load.block, self.host[load.slot])
            return load.slot in self.host
        found = self.disk.get(load.slot)
        if found is None or found.record != load.record or found.checksum != hash(found.values) or self.failed():
            self._fill(load.block, range(self.size))  # part of it had come before that was seen
            return False
        self._fill(load.block, found.values)
        return True

    def _fill(self, block: int, values: Iterable[int]) -> None:
        for offset, value in enumerate(values):
            self.runner.kv[block, offset] = value


class Watched(RememberingRunner):
    """Tells a mover of its steps."""

    mover: RememberingMover | None = None

    def start(self, batch: Sequence[Scheduled]) -> Finish:
        mover = self.mover
        assert mover is not None
        use = mover.step_begins(batch)
        finish = super().start(batch)

        def watched() -> list[SampledToken | None]:
            mover.go_on()
            results = finish()
            mover.step_ends(use)
            return results

        return watched


def tiered_engine(runner_type: type[Watched], chance: Random, **changes: Any) -> tuple[Engine, RememberingMover]:
    """A small engine with lower media; any field of EngineConfig can be changed."""
    defaults = {"block_size": SIZE, "num_blocks": 64, "host_blocks": 64, "max_num_seqs": 8}
    config = EngineConfig(
        **{"model": MODEL, "engine": "simulated", "max_num_batched_tokens": 32, **defaults, **changes}
    )
    clock = VirtualClock()
    runner = runner_type(config.simulated, clock, config.vocabulary, config.eos_token_ids)
    mover = RememberingMover(runner, config.block_size, config.num_blocks + config.host_blocks, chance)
    runner.mover = mover
    return Engine(config, runner, clock, mover), mover
