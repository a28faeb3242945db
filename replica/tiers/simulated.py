"""A mover that moves nothing: its loads and writes take the time that they would take."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from replica.cache.chain import Chain
from replica.cache.lower import DISK
from replica.cache.moves import PULLED, Transfer, Write, Written
from replica.runners.clock import Clock
from replica.tiers.mover import Landed, LoadSpeeds, Mover


class SimulatedMover(Mover):
    """One load follows the other, as do writes; a saved or erased block takes no time.

    `tokens_per_s`: by source. `read`: how many leading blocks of a chain the neighbour at an endpoint has.
    """

    def __init__(
        self,
        clock: Clock,
        tokens_per_s: Mapping[str, float],
        block_size: int,
        read: Callable[[str, Chain], int] = lambda endpoint, chain: 0,  # noqa: ARG005
    ) -> None:
        self.speeds = LoadSpeeds(clock.now_s)
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._block_size = block_size
        self._read = read
        self._moving: deque[tuple[float, Transfer]] = deque()
        self._ready_s = 0.0
        self._writing: deque[tuple[float, Write]] = deque()
        self._written_s = 0.0

    @property
    def next_s(self) -> float | None:
        """When the next transfer ends; None if there is none."""
        return self._moving[0][0] if self._moving else None

    def write(self, writes: Sequence[Write]) -> None:
        self._written_s = max(self._clock.now_s(), self._written_s)
        for write in writes:
            self._written_s += self._block_size / self._tokens_per_s[DISK]
            self._writing.append((self._written_s, write))

    def begin(self, transfer: Transfer) -> None:
        self._ready_s = max(self._clock.now_s(), self._ready_s)
        for load in transfer.loads:
            load_s = self._block_size / self._tokens_per_s[load.medium]
            self.speeds.add(load.medium, 1, load_s)
            self._ready_s += load_s
        transfer.came = len(transfer.loads)
        if transfer.pull is not None:
            pull = transfer.pull
            readable = self._read(pull.endpoint, pull.chain)
            transfer.pulled = max(0, min(readable - pull.start, len(pull.blocks)))
            if transfer.pulled:
                pull_s = transfer.pulled * self._block_size / self._tokens_per_s[PULLED]
                self.speeds.add(PULLED, transfer.pulled, pull_s)
                self._ready_s += pull_s
        self._moving.append((self._ready_s, transfer))

    def landed(self) -> Landed:
        now_s = self._clock.now_s()
        transfers, written = [], []
        while self._moving and self._moving[0][0] <= now_s:
            transfers.append(self._moving.popleft()[1])
        while self._writing and self._writing[0][0] <= now_s:
            written.append(Written(self._writing.popleft()[1], True))
        return transfers, written
