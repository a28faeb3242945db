"""The places of workers that run in one process."""

import mmap
from pathlib import Path

from router.tenants.shared_limits import SharedLimits
from router.workers.processes import Place
from router.workers.ring import RING_BYTES, Ring


def places(workers: int, folder: Path) -> list[Place]:
    serving, rings, usage = mmap.mmap(-1, 1), mmap.mmap(-1, workers * RING_BYTES), SharedLimits(workers)
    serving[0] = workers
    return [
        Place(number, workers, serving, folder, usage, Ring(rings, workers, number), joins=False)
        for number in range(workers)
    ]
