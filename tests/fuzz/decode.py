"""Structural fuzz of reading events: `python -m tests.fuzz.decode --count 1000000`.

Real payloads are taken apart, changed and put together again; each goes through a decoder and a resolver. Whatever a
replica sends, the outcome is a batch or BadBatch, soon, and in bounded memory. Input number N depends on the seed and N
alone, and a resolver lives for BLOCK inputs, so a failure comes again with `--seed S --first F --count C` as printed.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import msgspec

from events.blocks import block_keys, root_key
from events.cache.changes import Stored
from events.cache.resolver import Resolver
from events.messages import BadBatch, BlockRemoved, BlockStored, Decoder, EventBatch, RejectedEvent, encode_batch
from tests.oracle.vectors import VECTORS, read

BLOCK = 2000  # inputs by one resolver
CHECK_EVERY = 100
SLOW_S = 1.0
GROWTH_MIB = 300
SHOWN_S = 10.0  # between two reports
SMALL_BYTES = 1500
LARGEST_BYTES = 2**17  # reading takes up to 1.4 us a byte, so the limit in time needs one in size
DEPTHS = [2, 50, 490, 900, 960, 990, 1100, 3000]  # near the nesting limits of msgspec and Python

pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode

HUGE_HEADERS = [
    bytes.fromhex(h) for h in ("ddffffffff", "dfffffffff", "dbffffffff", "c6ffffffff", "c9ffffffff01", "dcffff")
]
ODD_BYTES = [
    b"\xc1",
    b"\xa2\xff\xfe",
    b"\xd4\x05\x00",
    b"\xd6\xff\x00\x00\x00\x01",
    b"\x81\x81\x01\x02\x03",
    b"\x81\x91\x01\x02",
]
ODD_VALUES: list[Any] = [
    *(0, 1, -1, 127, 128, 255, 256, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1.0, 1.5, 1e308, float("inf"), float("nan")),
    *(None, True, False, "", "x", "1", "GPU", "é" * 30, "9" * 5000, b"", b"x", bytes(32)),
    *([], {}, [[]], [None], [1, 2], {"": None}, {1: 2}, [["img", 1]], [{"hash": [1], "start_offset": 2}]),
    *("BlockStored", "BlockRemoved", "AllBlocksCleared", "Unknown", "sliding_window"),
    msgspec.msgpack.Ext(5, b"data"),
]
ODD_PACKED = [pack(value) for value in ODD_VALUES]
ODD_KEYS: list[Any] = [*BlockStored.__struct_fields__, "type", "", "new", "é" * 30, 0, -1, None, 1.5, b"type", True]


def real_payloads() -> list[bytes]:
    """Every payload in the vectors, once."""
    found: dict[bytes, None] = {}
    for path in sorted(VECTORS.rglob("*.jsonl")):
        for record in read(path):
            if "payload_hex" in record:
                found[bytes.fromhex(record["payload_hex"])] = None
            elif record.get("kind") in ("live", "replay_reply") and record["frames"][-1]:
                found[bytes.fromhex(record["frames"][-1])] = None
    return list(found)


def native_payloads() -> list[bytes]:
    """Payloads of a native replica: their hashes are block keys. The first is a chain from the root."""
    root = root_key("", None, None, 4)
    payloads = []
    for start in range(20):
        tokens = [start * 7 + place for place in range(16)]
        keys: list[Any] = block_keys(tokens, 4, root)
        whole = BlockStored(keys, None, tokens, 4, None, "GPU", None)
        tail = BlockStored(keys[2:], keys[1], tokens[8:], 4, None, "GPU", None)
        payloads += [
            encode_batch(EventBatch(0.0, [whole])),
            encode_batch(EventBatch(0.0, [tail, BlockRemoved(keys[1:3], "GPU")])),
        ]
    return payloads


class Mutator:
    """Makes inputs out of payloads. Those small enough to be many are taken most of the time."""

    def __init__(self, payloads: list[bytes]) -> None:
        self.all = payloads
        self.small = [payload for payload in payloads if len(payload) <= SMALL_BYTES]
        self.rng = Random()

    def input(self, seed: int, number: int) -> bytes:
        rng = self.rng
        rng.seed(f"{seed}:{number}")
        payload = self._payload()
        if rng.random() < 0.85:
            with suppress(msgspec.DecodeError, OverflowError):  # one vector is not msgpack; some integers have no room
                tree = [unpack(payload)]
                for _ in range(rng.choice((1, 1, 2, 3, 8))):
                    self._change(*self._place(tree))
                changed = pack(tree[0]) if tree else b""
                payload = changed if len(changed) <= LARGEST_BYTES else payload
        return self._changed_bytes(payload) if rng.random() < 0.15 else payload

    def _payload(self) -> bytes:
        return self.rng.choice(self.small if self.rng.random() < 0.98 else self.all)

    def _place(self, tree: list[Any]) -> tuple[Any, Any]:
        """A container in the tree and a place in it, mostly inside an event, where a change does not spoil the rest."""
        parent: Any = tree
        match tree:
            case [[_, [_, *_] as events, *_]] if self.rng.random() < 0.9:
                parent = events
        while True:
            at = self.rng.choice(list(parent)) if isinstance(parent, dict) else self.rng.randrange(len(parent) or 1)
            child = parent[at] if parent else None
            if not isinstance(child, list | dict) or not child or self.rng.random() < 0.15:
                return parent, at
            parent = child

    def _change(self, parent: Any, at: Any) -> None:
        """Replace, delete, insert, repeat or move what is there, or put in a piece of another payload."""
        rng = self.rng
        kind, is_map = rng.randrange(8), isinstance(parent, dict)
        if kind < 2 or not parent:
            value: Any = self._odd()
        elif kind < 4:
            other, place = self._place([unpack(rng.choice(self.small))])
            value = other[place] if other else []
        elif kind == 4:
            value = [parent[at]] if rng.random() < 0.5 else str(parent[at])[:100]
        elif kind == 5:
            del parent[at]
            return
        else:
            value = parent[at]
        if is_map:
            if kind == 6:
                del parent[at]  # its name becomes another one
            parent[rng.choice(ODD_KEYS) if kind >= 6 or rng.random() < 0.3 or not parent else at] = value
        elif kind >= 6:
            parent[at:at] = [value] * rng.choice((1, 1, 2, 50))
        elif parent and rng.random() < 0.7:
            parent[at] = value
        else:
            parent.insert(at, value)

    def _odd(self) -> Any:
        """Any value, rarely one that makes the whole payload unreadable."""
        rng = self.rng
        match rng.randrange(32):
            case 0:
                return msgspec.Raw(rng.choice(HUGE_HEADERS) + rng.randbytes(rng.randrange(8)))
            case 1:
                return msgspec.Raw(rng.choice(ODD_BYTES))
            case 2:
                opening, middle = rng.choice(((b"\x91", b"\xc0"), (b"\x81\xa1x", b"\xc0"), (b"\x92\xc0", b"\x91\x01")))
                return msgspec.Raw(opening * rng.choice(DEPTHS) + middle)
            case 3 | 4 | 5 | 6:
                return rng.randrange(-(2**63), 2**64)
            case _:
                return unpack(rng.choice(ODD_PACKED))  # a copy of its own, for it may be changed in turn

    def _changed_bytes(self, payload: bytes) -> bytes:
        """Cut off, take out, repeat, or write over some bytes."""
        rng = self.rng
        at = rng.randrange(len(payload) + 1)
        upto = at + rng.choice((1, 1, 2, 9, 100))
        part = payload[at:upto]
        put = rng.choice([b"", part * 2, rng.randbytes(len(part)), rng.choice(HUGE_HEADERS + ODD_BYTES)])
        return payload[:at] if rng.random() < 0.15 else payload[:at] + put + payload[upto:]


class Failure(Exception):
    """Something other than a batch or BadBatch came of an input."""


class Report(msgspec.Struct):
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    rejected_events: int = 0
    named_blocks: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0


class Subject:
    """The decoders and the resolver that one block of inputs goes through; every fourth is a native replica's."""

    def __init__(self, block: int) -> None:
        self.native = block % 4 == 3
        self.resolver = Resolver(native=self.native, orphan_limit=1000)
        self.tolerant = Decoder()
        self.tolerant.decode(pack([0.0, [["AllBlocksCleared"]]]))

    def take(self, payload: bytes, report: Report) -> None:
        """Applies the payload; raises BadBatch if it is refused, and must never raise anything else."""
        batch = Decoder(skim=self.native).decode(payload)
        report.accepted += 1
        report.rejected_events += sum(isinstance(event, RejectedEvent) for event in batch.events)
        for change in self.resolver.apply(batch.events):
            report.named_blocks += len(change.keys) if isinstance(change, Stored) else 0

    def take_again(self, payload: bytes) -> None:
        """A stream that has met another layout once reads everything tolerantly."""
        self.resolver.apply(self.tolerant.decode(payload).events)


def fuzz(count: int, seed: int, first: int = 0) -> Iterator[Report]:
    """Runs the inputs from number `first` on, and yields the report so far after each block of them."""
    real, native = Mutator(real_payloads()), Mutator(native_payloads())
    report = Report()
    baseline, started = peak_mib(), time.perf_counter()
    for start in range(first - first % BLOCK, first + count, BLOCK):
        subject = Subject(start // BLOCK)
        if subject.native:
            subject.take(native.all[0], Report())
        for number in range(start, min(start + BLOCK, first + count)):
            mutator = native if subject.native and number % 2 else real
            run_one(subject, mutator.input(seed, number), number, report)
        report.seconds = time.perf_counter() - started
        if (growth_mib := peak_mib() - baseline) > GROWTH_MIB:
            raise Failure(f"memory grew by {growth_mib:.0f} MiB until input {start + BLOCK}")
        yield report


def run_one(subject: Subject, payload: bytes, number: int, report: Report) -> None:
    report.inputs += 1
    start = time.process_time()  # of the processor, which a busy machine does not stretch
    try:
        try:
            subject.take(payload, report)
        except BadBatch:
            report.refused += 1
        if number % 4 == 0:
            with suppress(BadBatch):
                subject.take_again(payload)
        if number % CHECK_EVERY == 0:
            subject.resolver.check()
    except Exception as error:
        raise Failure(f"input {number}: {type(error).__name__}: {error}\npayload: {payload.hex()}") from error
    taken_s = time.process_time() - start
    report.slowest_s = max(report.slowest_s, taken_s)
    if taken_s > SLOW_S:
        raise Failure(f"input {number}: took {taken_s:.1f} s\npayload: {payload.hex()}")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="how many inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    options = parser.parse_args()
    report, shown_s = Report(), 0.0
    try:
        for report in fuzz(options.count, options.seed, options.first):
            if report.seconds - shown_s > SHOWN_S:
                shown_s = report.seconds
                print(report, flush=True)
    except Failure as failure:
        begin = (options.first + report.inputs) // BLOCK * BLOCK
        print(f"FAILED {failure}")
        print(f"again: python -m tests.fuzz.decode --seed {options.seed} --first {begin} --count {BLOCK}")
        return 1
    print(f"passed: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
