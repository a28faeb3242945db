"""The real NIXL between two processes; skipped where the extra `nixl` is not installed."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed: pip install 'warmroute[nixl]'")

from replica.neighbours.nixl import NIXL, NixlReader
from replica.neighbours.reader import Reader, ReaderConfig
from replica.neighbours.transports import TCP, ReaderTransport, TcpReader
from tests.events.processes import wait_until
from tests.replica.engines import MODEL
from tests.replica.neighbours.replicas import LAYOUT, SECRET, ArrayMemory, came, source_process, wanted

MEGABYTE = 1_000_000
SOON_S = 20.0


def soon() -> float:
    return time.monotonic() + SOON_S


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX would read a stopped process's memory by itself; between machines it cannot."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@contextmanager
def reading(memory: ArrayMemory, **changes: float) -> Iterator[Reader]:
    transports: dict[str, ReaderTransport] = {
        NIXL: NixlReader(memory.block_bytes),
        TCP: TcpReader(memory.block_bytes),
    }
    own = Reader(ReaderConfig(secret=SECRET, model=MODEL, kv_layout=LAYOUT, **changes), memory, transports)
    try:
        yield own
    finally:
        own.close()


def test_blocks_come_by_nixl(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "replica")
    memory, want = ArrayMemory(24, MEGABYTE), wanted(24)
    with source_process(blocks=24, num_blocks=64, block_bytes=MEGABYTE, share=1.0, nixl=True) as source:
        with reading(memory) as own:
            for _ in range(2):
                assert own.pull(source.endpoint, want, range(24), soon()) == 24
                assert came(memory, want, range(24), 24)
            assert not own.counts.failures
        wait_until(lambda: source.ask("held") == "0", "all is given back")
    assert [record.message.rpartition(" ")[2] for record in caplog.records] == [NIXL]


def test_a_source_without_nixl_is_read_by_tcp(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "replica")
    memory, want = ArrayMemory(24, MEGABYTE), wanted(24)
    with source_process(blocks=24, num_blocks=64, block_bytes=MEGABYTE, share=1.0) as source, reading(memory) as own:
        assert own.pull(source.endpoint, want, range(24), soon()) == 24
        assert came(memory, want, range(24), 24)
    assert [record.message.rpartition(" ")[2] for record in caplog.records] == [TCP]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_goes_leaves_what_came_until_then(number: signal.Signals) -> None:
    """Its transfer may never end; the next source is read into another buffer."""
    memory, want = ArrayMemory(24, MEGABYTE), wanted(24)
    options = {"blocks": 24, "num_blocks": 64, "block_bytes": MEGABYTE, "share": 1.0, "nixl": True}
    with reading(memory, stall_s=1.0) as own:
        with source_process(**options) as source:
            memory.on_write = lambda block: os.kill(source.pid, number) if block == 4 else None
            began_s = time.monotonic()
            count = own.pull(source.endpoint, want, range(24), soon())
            assert 5 <= count < 24
            assert time.monotonic() - began_s < SOON_S / 2
            assert came(memory, want, range(24), count)
            assert sum(own.counts.failures.values()) == 1
        memory.on_write = lambda _: None
        with source_process(**options) as source:
            assert own.pull(source.endpoint, want, range(24), soon()) == 24
            assert came(memory, want, range(24), 24)
