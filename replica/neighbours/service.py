"""Both sides for one engine: it is read, and it reads."""

import logging
import threading
import time
from collections.abc import Callable

from replica.cache.block_pool import BlockPool
from replica.cache.moves import Pull
from replica.config import EngineConfig
from replica.messages import NeighbourSnapshot
from replica.neighbours.connection import Counts
from replica.neighbours.holds import Holds
from replica.neighbours.reader import Reader, ReaderConfig, Wanted
from replica.neighbours.source import Source, SourceConfig, StoredBlocks
from replica.runners.runner import BlockMemory

log = logging.getLogger(__name__)


class Neighbours:
    """A Puller for a mover; once it listens, the engine's thread polls `descriptor` and calls `serve`."""

    def __init__(self, config: EngineConfig, memory: BlockMemory, kv_layout: str) -> None:
        assert config.kv_secret is not None and config.kv_read is not None
        self.kv_layout = kv_layout
        self._endpoint = config.kv_read
        self._served = SourceConfig(
            secret=config.kv_secret.encode(),
            model=config.model,
            kv_layout=kv_layout,
            block_size=config.block_size,
            most_tokens=config.max_model_len,
        )
        read = ReaderConfig(secret=self._served.secret, model=config.model, kv_layout=kv_layout)
        self._reader = Reader(read, memory)
        self._stopped = threading.Event()
        self._holds: Holds | None = None
        self._source: Source | None = None

    # ---- a mover's thread

    def pull(self, pull: Pull, give_way: Callable[[float, float], None]) -> int:
        wanted = Wanted(pull.chain, pull.start, pull.start + len(pull.blocks))
        deadline_s = time.monotonic() + pull.patience_s
        return self._reader.pull(pull.endpoint, wanted, pull.blocks, deadline_s, self._stopped, give_way)

    def close(self) -> None:
        self._reader.close()

    # ---- the engine's thread

    def listen(self, pool: BlockPool, stored: StoredBlocks) -> None:
        """Let neighbours read blocks of this pool; raise OSError if nothing can listen at the endpoint."""
        self._holds = Holds(pool)
        self._source = Source(self._served, self._endpoint, self._holds, stored)
        log.info("neighbours may read blocks at %s", self._source.endpoint)

    @property
    def descriptor(self) -> int:
        assert self._holds is not None
        return self._holds.descriptor

    @property
    def endpoint(self) -> str:
        assert self._source is not None
        return self._source.endpoint

    @property
    def references(self) -> dict[int, int]:
        assert self._holds is not None
        return self._holds.references

    def serve(self) -> None:
        assert self._holds is not None
        self._holds.serve()

    def snapshot(self) -> dict[str, NeighbourSnapshot]:
        assert self._source is not None
        return {"read": _snapshot(self._source.counts), "pulled": _snapshot(self._reader.counts)}

    def stop(self) -> None:
        """End what is under way on both sides; `close` ends the rest when no pull runs any more."""
        self._stopped.set()
        if self._source is not None:
            self._source.close()
        if self._holds is not None:
            self._holds.close()


def _snapshot(counts: Counts) -> NeighbourSnapshot:
    return NeighbourSnapshot(
        blocks=counts.blocks, bytes=counts.bytes, seconds=counts.seconds, failures=dict(counts.failures)
    )
