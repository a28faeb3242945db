"""Both sides for one engine: it is read, and it reads."""

import logging

from replica.cache.block_pool import BlockPool
from replica.messages import NeighbourSnapshot
from replica.neighbours.holds import Holds
from replica.neighbours.reader import Reader
from replica.neighbours.source import Source, StoredBlocks

log = logging.getLogger(__name__)


class Neighbours:
    """The engine's thread polls `holds.descriptor`, and calls `holds.serve`."""

    def __init__(self, reader: Reader, endpoint: str, pool: BlockPool, stored: StoredBlocks) -> None:
        """Let neighbours read blocks of this pool; raise OSError if nothing can listen at the endpoint."""
        self.kv_layout = reader.config.kv_layout
        self.holds = Holds(pool)
        self._reader = reader
        self._source = Source(reader.config, endpoint, self.holds, stored)
        self.endpoint = self._source.endpoint
        log.info("neighbours may read blocks at %s", self.endpoint)

    def snapshot(self) -> dict[str, NeighbourSnapshot]:
        return {"read": self._source.counts.snapshot(), "pulled": self._reader.counts.snapshot()}

    def stop(self) -> None:
        """End what is under way on both sides; the reader is closed when no pull runs any more."""
        self._reader.stop()
        self._source.close()
        self.holds.close()
