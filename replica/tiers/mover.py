"""Carries out moves of blocks between media.

Saves before a step are done at once, because it overwrites what they copy. Everything else has threads of its own: some
load, some save what loads will overwrite, one writes to the disk, one reads from neighbours.
"""

import logging
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from math import inf
from threading import Lock
from time import monotonic, sleep, thread_time
from typing import NamedTuple, TypeAlias

import numpy as np

from replica.cache.moves import PULLED, GiveWay, Load, Pull, Save, Transfer, Write, Written
from replica.disk.file import DiskFile
from replica.disk.record import NOTHING, Recovery
from replica.messages import DiskCounters
from replica.runners.runner import BlockMemory

HALF_LIFE_BLOCKS = 500.0
FORGET_S = 60.0  # a medium that seemed too slow is tried again


class Measured(NamedTuple):
    blocks: float
    seconds: float
    at_s: float


class LoadSpeeds:
    """Blocks per second by medium; the past fades, and is forgotten when nothing new comes."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self._measured: dict[str, Measured] = {}

    def add(self, medium: str, blocks: int, duration_s: float) -> None:
        before = self._measured.get(medium, Measured(0.0, 0.0, 0.0))
        fading = 0.5 ** (blocks / HALF_LIFE_BLOCKS)
        self._measured[medium] = Measured(
            before.blocks * fading + blocks, before.seconds * fading + duration_s, self._now_s()
        )

    def blocks_per_s(self, medium: str) -> float:
        """0 while it is not known."""
        known = self._measured.get(medium)
        if known is None or known.seconds <= 0 or self._now_s() - known.at_s > FORGET_S:
            return 0.0
        return known.blocks / known.seconds

    def media(self) -> Iterable[str]:
        return tuple(self._measured)  # others add to them meanwhile


CLOSING_S = 5.0
TOGETHER = 16  # blocks that a device moves before others have their turn
PARTS = 2  # this many parts go in each direction at once: a device has the next before the last is done
BESIDE_SHARE = 0.05  # a processor's time for loads, and as much for pulls, while the CPU computes a step

log = logging.getLogger(__name__)

# Reads blocks from a neighbour, for one thread, and returns how many leading ones have come and were verified; nothing
# that a neighbour does raises.
Puller: TypeAlias = Callable[[Pull, GiveWay], int]
Landed: TypeAlias = tuple[list[Transfer], list[Written]]


class HostMemory:
    """Blocks of host memory, which the system gives when they are first written.

    They begin at a page: from there a disk takes blocks of whole pages without another copy.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        count = num_slots * block_bytes
        try:
            pages = mmap.mmap(-1, max(1, count), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"--host-kv-gb {count / 1e9:g}: this is more memory than there is; give less") from error
        self.whole = memoryview(pages)[:count]
        self._blocks = np.frombuffer(pages, np.uint8, count).reshape(num_slots, block_bytes)

    def __getitem__(self, slot: int) -> memoryview:
        return memoryview(self._blocks[slot])


class Mover:
    """Slots are counted as in `replica.cache.contents`: the host's from `first_slot`, then the disk's."""

    def __init__(
        self,
        memory: BlockMemory,
        host: HostMemory,
        first_slot: int,
        disk: DiskFile | None = None,
        pull: Puller | None = None,
    ) -> None:
        self.speeds = LoadSpeeds()
        self.computing = False  # set by the engine: others would notice a move
        self._memory = memory
        self._host = host
        self._first_slot = first_slot
        self._first_on_disk = first_slot + host.num_slots
        self._disk = disk
        self._puller = pull
        self.disk_counters = DiskCounters() if disk is None else disk.counters
        self._clears = 0
        self._staging = HostMemory(1, memory.block_bytes)[0]
        self._staging_lock = Lock()
        if host.num_slots:
            memory.pin(host.whole)
        self._unsaved: set[int] = set()  # slots that lack the blocks of their names
        self._landed: deque[Transfer] = deque()
        self._written: deque[Written] = deque()
        threads = 1 if memory.is_host else PARTS
        self._transfers = ThreadPoolExecutor(1, "kv-transfer")
        self._saver = ThreadPoolExecutor(threads, "kv-save")
        self._loader = ThreadPoolExecutor(threads, "kv-load")
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._reader = ThreadPoolExecutor(1, "kv-pull")

    @property
    def block_bytes(self) -> int:
        return self._memory.block_bytes

    def read(self, slots: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy blocks of the pool, or slots of the host's memory. The caller holds them."""
        for slot, target in zip(slots, into, strict=True):
            if slot < self._first_slot:
                self._memory.read([slot], [target])
            else:
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self._host[slot - self._first_slot], np.uint8))

    def recover(self) -> Recovery:
        """Read what the disk has; called once, before anything moves."""
        return NOTHING if self._disk is None else self._disk.recover()

    def save(self, saves: Sequence[Save]) -> None:
        """Copy these blocks before the call returns."""
        slots = [save.slot for save in saves]
        self._unsaved.update(slots)
        self._memory.read([save.block for save in saves], [self._host[slot - self._first_slot] for slot in slots])
        self._unsaved.difference_update(slots)

    def begin(self, transfer: Transfer) -> None:
        """Begin to save, then to load. What could not be saved is lost, also to transfers and writes after this."""
        self._transfers.submit(self._carry_out, transfer)

    def write(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self._writer.submit(self._write, write, self._clears)

    def erase(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert self._disk is not None
            self._writer.submit(self._disk.erase, slot - self._first_on_disk)

    def clear(self) -> None:
        """Make all slots of the disk unreadable before the call returns. Writes that have not begun do not happen."""
        if self._disk is not None:
            self._clears += 1
            self._writer.submit(self._disk.clear).result()

    def landed(self) -> Landed:
        """Return what has ended since the last call."""
        transfers = [self._landed.popleft() for _ in range(len(self._landed))]
        return transfers, [self._written.popleft() for _ in range(len(self._written))]

    def close(self) -> None:
        """Write for CLOSING_S what waits for the disk, and leave the rest undone."""
        self.computing = False
        for pool in (self._transfers, self._loader, self._saver):  # the first waits for the others
            pool.shutdown(cancel_futures=True)
        with suppress(TimeoutError):
            self._writer.submit(int).result(CLOSING_S)
        self._writer.shutdown(cancel_futures=True)
        self._reader.shutdown(cancel_futures=True)
        if self._disk is not None:
            self._disk.close()

    # ---- on the threads

    def _carry_out(self, transfer: Transfer) -> None:
        try:
            self._load_all(transfer)
        except Exception:  # a tier may fail in any way, and then the waiting request computes the missing tokens
            log.exception("blocks could not be loaded")
        transfer.lost += [slot for _, slot in transfer.saves if slot in self._unsaved]
        if transfer.pull is not None and transfer.came == len(transfer.loads):
            self._reader.submit(self._pull, transfer, transfer.pull)
        else:
            self._landed.append(transfer)

    def _load_all(self, transfer: Transfer) -> None:
        saves = list({save.slot: save for save in transfer.saves}.values())  # parts have no order: the last one counts
        saving = [self._saver.submit(self.save, saves[at : at + TOGETHER]) for at in range(0, len(saves), TOGETHER)]
        saved_by = {place: saving[number // TOGETHER] for number, save in enumerate(saves) for place in save}
        together: list[Sequence[Load]] = []
        at = 0
        while at < len(transfer.loads):
            end = at + 1
            # Loads from the host's memory go together, where a device gains by that; others one by one.
            if not self._memory.is_host and transfer.loads[at].record is None:
                most = min(len(transfer.loads), at + TOGETHER)
                while end < most and transfer.loads[end].record is None:
                    end += 1
            together.append(transfer.loads[at:end])
            at = end
        loading = [self._loader.submit(self._load_after, saved_by, loads) for loads in together]
        since_s = monotonic()
        try:
            for loads, part in zip(together, loading, strict=True):
                came = part.result()
                transfer.came += came
                if came:
                    now_s = monotonic()
                    self.speeds.add(loads[0].medium, came, now_s - since_s)
                    since_s = now_s
                if came < len(loads):
                    transfer.lost.append(loads[came].slot)
                    break
        finally:
            for part in loading:
                part.cancel()
            wait(loading)
            wait(saving)
        for done in saving:
            done.result()

    def _load_after(self, saved_by: "Mapping[int, Future[None]]", loads: Sequence[Load]) -> int:
        """Load after the saves of the blocks that this overwrites, and of the slots that it reads."""
        places = (place for load in loads for place in (load.block, load.slot))
        for saved in {saved_by[place] for place in places if place in saved_by}:
            saved.result()
        began_s = thread_time()
        came = self._load(loads)
        self._give_way(thread_time() - began_s)
        return came

    def _give_way(self, took_s: float, most_s: float = inf) -> None:
        """Pause after a block that took this long, if a step needs the same memory and processor."""
        if self.computing and self._memory.is_host:
            sleep(min(most_s, took_s * (1 / BESIDE_SHARE - 1)))

    def _pull(self, transfer: Transfer, pull: Pull) -> None:
        began_s = monotonic()
        paused_s = 0.0

        def give_way(took_s: float, most_s: float) -> None:
            nonlocal paused_s
            pause_s = monotonic()
            self._give_way(took_s, most_s)
            paused_s += monotonic() - pause_s

        try:
            assert self._puller is not None
            transfer.pulled = self._puller(pull, give_way)
            if transfer.pulled:
                # The pauses do not count, as they end in time for the rest: small models would never pull again.
                self.speeds.add(PULLED, transfer.pulled, monotonic() - began_s - paused_s)
        except Exception:  # a neighbour or its bytes may fail in any way, and then the request computes the tokens
            log.exception("blocks could not be read from a neighbour")
        finally:
            self._landed.append(transfer)

    def _load(self, loads: Sequence[Load]) -> int:
        """Return how many leading loads were carried out and are what they should be."""
        record = loads[0].record
        if record is None:
            payloads = [self._host[load.slot - self._first_slot] for load in loads]
            self._memory.write([load.block for load in loads], payloads)
            return next((number for number, load in enumerate(loads) if load.slot in self._unsaved), len(loads))
        (load,) = loads
        assert self._disk is not None
        with self._staging_lock:
            if not self._disk.read(load.slot - self._first_on_disk, record, self._staging):
                return 0
            self._memory.write([load.block], [self._staging])
        return 1

    def _write(self, write: Write, clears: int) -> None:
        assert self._disk is not None
        done = False
        try:
            if clears == self._clears and write.source not in self._unsaved:
                payload = self._host[write.source - self._first_slot]
                done = self._disk.write(write.slot - self._first_on_disk, write.record, payload)
        except Exception:  # its slots are held until the outcome is known
            log.exception("a block could not be written")
        finally:
            self._written.append(Written(write, done))
