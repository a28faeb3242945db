"""A mover that moves nothing: its loads take the time that they would take."""

from collections import deque
from collections.abc import Mapping, Sequence

from replica.clock import Clock
from replica.tiers.mover import Landed
from replica.tiers.moves import Save, Transfer, Write
from replica.tiers.recovery import NOTHING, Recovery
from replica.tiers.speeds import LoadSpeeds


class SimulatedMover:
    """`tokens_per_s` by medium. One load follows the other, and a saved block takes no time."""

    def __init__(self, clock: Clock, tokens_per_s: Mapping[str, float], block_size: int) -> None:
        self.speeds = LoadSpeeds(clock.now_s)
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._block_size = block_size
        self._moving: deque[tuple[float, Transfer]] = deque()
        self._ready_s = 0.0

    @property
    def next_s(self) -> float | None:
        """When the next transfer ends; None if there is none."""
        return self._moving[0][0] if self._moving else None

    def recover(self) -> Recovery:
        return NOTHING

    def save(self, saves: Sequence[Save]) -> None: ...

    def write(self, writes: Sequence[Write]) -> None:
        assert not writes, "a simulated replica has no disk"

    def erase(self, slots: Sequence[int]) -> None:
        assert not slots, "a simulated replica has no disk"

    def begin(self, transfer: Transfer) -> None:
        now_s = self._clock.now_s()
        self._ready_s = max(now_s, self._ready_s)
        for load in transfer.loads:
            load_s = self._block_size / self._tokens_per_s[load.medium]
            self.speeds.add(load.medium, 1, load_s)
            self._ready_s += load_s
        transfer.came = len(transfer.loads)
        self._moving.append((self._ready_s, transfer))

    def landed(self) -> Landed:
        now_s = self._clock.now_s()
        ended = []
        while self._moving and self._moving[0][0] <= now_s:
            ended.append(self._moving.popleft()[1])
        return ended, []

    def close(self) -> None: ...
