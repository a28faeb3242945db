"""Both sides for one engine: it is read, and it reads."""

import logging
from pathlib import Path

from msgspec import Struct

from replica.block_memory import BlockMemory
from replica.block_pool import BlockPool
from replica.config import EngineConfig, KvTransport
from replica.messages import NeighbourSnapshot
from replica.neighbours.counts import Counts
from replica.neighbours.holds import Holds
from replica.neighbours.nixl import NIXL, NixlReader, NixlSource, NotInstalled
from replica.neighbours.reader import Reader, ReaderConfig
from replica.neighbours.source import STREAMS, Source, SourceConfig, StoredBlocks
from replica.neighbours.transports import TCP, ReaderTransport, SourceTransport, TcpReader, TcpSource

log = logging.getLogger(__name__)

RDMA_DEVICES = Path("/sys/class/infiniband")


class Transports(Struct, frozen=True):
    """The transports of both sides, by name, the best first."""

    source: dict[str, SourceTransport]
    reader: dict[str, ReaderTransport]


def make_transports(wanted: KvTransport, block_bytes: int, rdma_devices: Path = RDMA_DEVICES) -> Transports:
    """Raise ValueError if NIXL is demanded and cannot be had. Over plain Ethernet it is not faster than TCP."""
    transports = Transports({}, {})
    has_device = rdma_devices.is_dir() and any(rdma_devices.iterdir())
    if wanted == NIXL or (wanted == "auto" and has_device):
        try:
            transports.source[NIXL] = NixlSource(STREAMS, block_bytes)
            transports.reader[NIXL] = NixlReader(block_bytes)
        except NotInstalled as error:
            if wanted == NIXL:
                raise ValueError(f"--kv-transport nixl: {error}") from error
            log.info("blocks of neighbours come by TCP: %s", error)
    transports.source[TCP] = TcpSource(STREAMS, block_bytes)
    transports.reader[TCP] = TcpReader(block_bytes)
    return transports


class Neighbours:
    """The engine's thread polls `descriptor` and calls `serve`; a mover's thread pulls with `reader`."""

    def __init__(self, holds: Holds, source: Source, reader: Reader) -> None:
        self._holds = holds
        self._source = source
        self.reader = reader
        self.kv_layout = source.kv_layout

    @property
    def descriptor(self) -> int:
        return self._holds.descriptor

    @property
    def endpoint(self) -> str:
        return self._source.endpoint

    @property
    def references(self) -> dict[int, int]:
        """References to blocks that readers have."""
        return self._holds.references

    def serve(self) -> None:
        self._holds.serve()

    def snapshot(self) -> dict[str, NeighbourSnapshot]:
        """Return the counts of both sides."""
        return {"read": _snapshot(self._source.counts), "pulled": _snapshot(self.reader.counts)}

    def close(self) -> None:
        self._source.close()
        self.reader.close()
        self._holds.close()


def open_neighbours(
    config: EngineConfig, pool: BlockPool, stored: StoredBlocks, memory: BlockMemory, kv_layout: str
) -> Neighbours | None:
    """Listen for neighbours; None without a secret. ValueError, OSError: not as the configuration says.

    What neighbours read is `stored`, the blocks and the host's slots after them; what is pulled goes into `memory`.
    """
    if config.kv_secret is None or config.kv_read is None or not kv_layout:
        return None
    secret = config.kv_secret.encode()
    transports = make_transports(config.kv_transport, memory.block_bytes)
    holds = Holds(pool)
    served = SourceConfig(
        secret=secret,
        model=config.model,
        kv_layout=kv_layout,
        block_size=config.block_size,
        most_tokens=config.max_model_len,
    )
    source = Source(served, config.kv_read, holds, stored, transports.source)
    read = ReaderConfig(secret=secret, model=config.model, kv_layout=kv_layout)
    log.info("neighbours may read blocks at %s by %s", source.endpoint, ", ".join(transports.source))
    return Neighbours(holds, source, Reader(read, memory, transports.reader))


def _snapshot(counts: Counts) -> NeighbourSnapshot:
    return NeighbourSnapshot(
        blocks=counts.blocks, bytes=counts.bytes, seconds=counts.seconds, failures=dict(counts.failures)
    )
