"""Measure reading blocks from a neighbour: speed and CPU of each transport, between two processes on this machine."""

import time

from replica.neighbours.nixl import NIXL, NixlReader, NotInstalled
from replica.neighbours.reader import Reader, ReaderConfig
from replica.neighbours.transports import TCP, ReaderTransport, TcpReader
from tests.bench.measure import heading, row
from tests.replica.engines import MODEL
from tests.replica.neighbours.replicas import LAYOUT, SECRET, ArrayMemory, SourceProcess, source_process, wanted

MEGABYTE = 1_000_000
SIZES = (1.0, 3.7)  # MB of a block: 16 tokens of a model of 4B and of 30B parameters, or about that
COUNTS = (64, 128)
LIMIT_S = 60.0


def run(rounds: int) -> None:
    heading("reading blocks from a neighbour")
    for name in (TCP, NIXL):
        for size in SIZES:
            block_bytes = int(size * MEGABYTE)
            try:
                own = transport(name, block_bytes)
            except NotInstalled as error:
                print(f"| {name}: {error} | | |")
                break
            for count in COUNTS:
                measure(f"{count} blocks of {size:g} MB by {name}", own, count, block_bytes, rounds)
    print()


def transport(name: str, block_bytes: int) -> dict[str, ReaderTransport]:
    return {NIXL: NixlReader(block_bytes)} if name == NIXL else {TCP: TcpReader(block_bytes)}


def measure(what: str, transports: dict[str, ReaderTransport], count: int, block_bytes: int, rounds: int) -> None:
    memory = ArrayMemory(1, block_bytes)
    reader = Reader(ReaderConfig(secret=SECRET, model=MODEL, kv_layout=LAYOUT), memory, transports)
    options = {
        "blocks": count,
        "num_blocks": 3 * count,
        "block_bytes": block_bytes,
        "nixl": NIXL in transports,
        "lease_s": LIMIT_S,
    }
    speeds, own_cpu, source_cpu = [], [], []
    with source_process(share=1.0, **options) as source:
        pull(reader, source, count)  # the first one connects
        for _ in range(rounds):
            before_us, began_s, began_cpu_s = int(source.ask("cpu_us")), time.monotonic(), time.process_time()
            pull(reader, source, count)
            speeds.append(count * block_bytes / MEGABYTE / (time.monotonic() - began_s))
            own_cpu.append(1000 * (time.process_time() - began_cpu_s))
            source_cpu.append((int(source.ask("cpu_us")) - before_us) / 1000)
        reader.close()
    row(what, speeds, "MB/s")
    row(f"{what}: CPU of the reader", own_cpu, "ms")
    row(f"{what}: CPU of the source", source_cpu, "ms")


def pull(reader: Reader, source: SourceProcess, count: int) -> None:
    came = reader.pull(source.endpoint, wanted(count), [0] * count, time.monotonic() + LIMIT_S)
    assert came == count, f"{came} of {count} blocks came: {reader.counts.failures}"
