"""Virtual time, and movers that move nothing: the loads and writes of one take the time that they would take."""

from collections import deque
from collections.abc import Sequence

from replica.cache.moves import Save, Transfer
from replica.disk.record import NOTHING, Recovery
from replica.messages import DiskCounters
from replica.runners.clock import Clock
from replica.tiers.mover import Landed, LoadSpeeds, Mover


class VirtualClock:
    """Time that passes only during sleeps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s


class IdleMover(Mover):
    """One that has nothing to move."""

    disk_counters = DiskCounters()
    computing = False

    def __init__(self) -> None:
        pass

    def recover(self) -> Recovery:
        return NOTHING

    def save(self, saves: Sequence[Save]) -> None:
        pass

    def erase(self, slots: Sequence[int]) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass


class SimulatedMover(IdleMover):
    """One load follows the other, at so many tokens a second; saved blocks take no time."""

    def __init__(self, clock: Clock, tokens_per_s: float, block_size: int) -> None:
        self.speeds = LoadSpeeds(clock.now_s)
        self._clock = clock
        self._load_s = block_size / tokens_per_s
        self._moving: deque[tuple[float, Transfer]] = deque()
        self._ready_s = 0.0

    @property
    def next_s(self) -> float | None:
        """When the next transfer ends; None if there is none."""
        return self._moving[0][0] if self._moving else None

    def begin(self, transfer: Transfer) -> None:
        self._ready_s = max(self._clock.now_s(), self._ready_s)
        for load in transfer.loads:
            self.speeds.add(load.medium, 1, self._load_s)
            self._ready_s += self._load_s
        transfer.came = len(transfer.loads)
        self._moving.append((self._ready_s, transfer))

    def landed(self) -> Landed:
        transfers = []
        while self._moving and self._moving[0][0] <= self._clock.now_s():
            transfers.append(self._moving.popleft()[1])
        return transfers, []
