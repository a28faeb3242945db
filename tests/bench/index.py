"""Measure the router's index: a decision's input, events from bytes into the index, memory, churn."""

import functools
import json
import random
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable

from events.blocks import block_keys, pack_tokens
from events.cache.resolver import Resolver
from events.messages import BlockRemoved, BlockStored, EventBatch, Hash, encode_batch
from events.stream.foreign_stream import ForeignStream
from events.stream.states import StreamConfig
from events.view import CacheView
from router.placement.index import Matches, PrefixIndex
from tests.bench.events import BLOCK, ROOT, payload
from tests.bench.measure import cpu_us, heading, resident_bytes, row

REPLICAS = 64
ALL = (1 << REPLICAS) - 1
PROMPT_BLOCKS = 256
CACHE_BLOCKS = 15_000  # of each replica, beside the prompt
ENTRIES = 2_000_000
SHARING = 8
CHURN_BLOCKS = 10_000_000
EVENT_BLOCKS = 64


def run(rounds: int) -> None:
    heading(f"a prompt of 4,096 tokens (256 blocks) over {REPLICAS} replicas, from packed token ids; CPU per prompt")
    match(rounds)
    print()
    heading("events from bytes into the index, CPU per block")
    ingest(rounds)
    print()
    heading(f"a replica of {CACHE_BLOCKS:,} blocks leaves; CPU, total")
    leaving(rounds)
    print()
    heading(f"resident memory at {ENTRIES:,} entries (block, replica), resolvers included; per entry")
    for kind, beyond in (("native", 0), ("foreign int", 150), ("foreign bytes", 150)):
        for sharing, target in ((SHARING, 100), (1, 250)):
            name = f"{kind} hashes, {f'{sharing} replicas share the blocks' if sharing > 1 else 'nothing shared'}"
            row(name, apart(f"memory({kind!r}, {sharing})"), "B", f"<= {target + beyond}")
    print()
    heading(f"{CHURN_BLOCKS:,} blocks stored and removed, 8 replicas of 25,000 blocks")
    first, last, cpu = apart("churn()")
    row("highest resident memory in the first half", [first], "MB")
    row("highest in the second half", [last], "MB", "the same")
    row("stored and removed, CPU per block", [cpu], "us")


# ---- a decision's input


def match(rounds: int) -> None:
    chance = random.Random(1)
    tokens = [chance.randrange(150_000) for _ in range(PROMPT_BLOCKS * BLOCK)]
    packed = pack_tokens(tokens)
    keys = block_keys(packed, BLOCK, ROOT)
    even = filled(keys, [64 + 192 * (slot % 4 == 0) for slot in range(REPLICAS)])
    stairs = filled(keys, [4 * slot for slot in range(REPLICAS)])
    nobody = filled(keys, [0] * REPLICAS)

    def report(name: str, work: Callable[[], object], target: str = "") -> None:
        row(name, cpu_us(lambda: lambda: [work() for _ in range(200)], 200, rounds), "us", target)

    def decision(index: PrefixIndex) -> Callable[[], Matches]:
        return lambda: index.match(block_keys(packed, BLOCK, ROOT), ALL)

    report("hashing alone", lambda: block_keys(packed, BLOCK, ROOT))
    report("hash and match: all hold 64 blocks, a quarter all 256", decision(even), "<= 65 us")
    report("hash and match: every replica another length", decision(stairs))
    report("hash and match: nobody holds anything", decision(nobody))
    report("match alone, of the first", lambda: even.match(keys, ALL))
    for slot in range(1, REPLICAS, 16):
        even.optimistic.add(slot, keys, 1.0)
    report("hash and match: 4 more replicas have the rest optimistically", decision(even), "<= 100 us with the policy")
    even.store(2, keys, "CPU")
    report("hash and match: and one has it in CPU memory", decision(even))
    report("optimistic entries of a whole new prompt, made and expired", lambda: routed(even, keys))


def filled(keys: list[int], lengths: Iterable[int]) -> PrefixIndex:
    chance = random.Random(2)
    index = PrefixIndex()
    for length in lengths:
        slot = index.add()
        index.store(slot, [chance.getrandbits(64) for _ in range(CACHE_BLOCKS)])
        index.store(slot, keys[:length])
    return index


def routed(index: PrefixIndex, keys: list[int]) -> None:
    index.optimistic.add(3, keys, 2.0)
    index.optimistic.drop(3)


# ---- bytes to index


def ingest(rounds: int) -> None:
    chance = random.Random(1)
    for blocks, events in ((64, 1500), (1, 20_000)):
        for kind in ("native", "foreign int", "foreign bytes"):
            payloads = [payload(blocks, chance, kind) for _ in range(events)]
            target = "<= 1.8 us" if blocks == 64 else ""
            alone = cpu_us(functools.partial(reading, payloads, kind, 1), blocks * events, rounds)
            row(f"{blocks}-block events, {kind} hashes", alone, "us", target)
            few = payloads[: 4000 if blocks == 1 else 1000]
            shared = cpu_us(functools.partial(reading, few, kind, SHARING), blocks * len(few) * SHARING, rounds)
            row(f"{blocks}-block events, {kind} hashes, {SHARING} replicas with the same blocks", shared, "us", target)


def reading(payloads: list[bytes], kind: str, replicas: int) -> Callable[[], object]:
    index = PrefixIndex()
    views = [view(index, kind) for _ in range(replicas)]

    def work() -> None:
        for seq, one in enumerate(payloads):
            for each in views:
                each.perform(each.stream.live(seq, one, 0.0))

    return work


def view(index: PrefixIndex, kind: str) -> CacheView:
    """A replica's view, as the router makes it; it joins at batch 0, so that nothing needs repair."""
    native, slot = kind == "native", index.add()
    stream = ForeignStream(StreamConfig(can_replay=False))
    stream.connected(0.0)
    resolver = Resolver("m", native=native, intern=index.intern)
    return CacheView(kind, stream, resolver, skim=native, on_change=lambda change: index.apply(slot, change))


# ---- leaving


def leaving(rounds: int) -> None:
    chance = random.Random(3)
    for replicas in (2, REPLICAS):
        index = filled([], [0] * replicas)

        def prepared(index: PrefixIndex = index) -> Callable[[], object]:
            slot = index.add()
            index.store(slot, [chance.getrandbits(64) for _ in range(CACHE_BLOCKS)])
            return lambda: index.drop(slot)

        row(f"one of {replicas + 1} replicas, as many blocks each", cpu_us(prepared, 1000, rounds), "ms")


# ---- memory; each in a process of its own


def apart(call: str) -> list[float]:
    command = [sys.executable, "-c", f"from tests.bench import index; index.{call}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: list[float] = json.loads(result.stdout)
    return figures


def memory(kind: str, sharing: int) -> None:
    """Prints the bytes per entry with 8 replicas, which all hold the same blocks or none in common."""
    chance = random.Random(4)
    index = PrefixIndex()
    views = [view(index, kind) for _ in range(SHARING)]
    seqs = [0] * len(views)
    before = 0
    for turn in range(ENTRIES // (EVENT_BLOCKS * sharing) + 1):
        one = event(chance, kind)
        for number in range(SHARING) if sharing > 1 else [turn % SHARING]:
            views[number].perform(views[number].stream.live(seqs[number], one, 0.0))
            seqs[number] += 1
        if turn == 0:  # after one-time imports and allocations
            before = resident_bytes()
    entries = sum(index.blocks(slot)["GPU"] for slot in range(SHARING)) - EVENT_BLOCKS * sharing
    assert not any(view.resolver.lost for view in views)
    print([(resident_bytes() - before) / entries])


def event(chance: random.Random, kind: str) -> bytes:
    """A payload like `payload`'s, but made quickly: random tokens, or only keys where the resolver trusts them."""
    if kind == "native":
        return stored(array("Q", chance.randbytes(8 * EVENT_BLOCKS)).tolist(), [])
    tokens = array("I", chance.randbytes(4 * BLOCK * EVENT_BLOCKS)).tolist()
    if kind == "foreign bytes":
        return stored([chance.randbytes(32) for _ in range(EVENT_BLOCKS)], tokens)
    return stored(array("Q", chance.randbytes(8 * EVENT_BLOCKS)).tolist(), tokens)


def stored(hashes: Iterable[Hash], tokens: list[int]) -> bytes:
    parent = None if tokens else 1  # a native replica is put to the test only at the beginning of a chain
    return encode_batch(EventBatch(0.0, [BlockStored(list(hashes), parent, tokens, BLOCK, None, "GPU", None)], 0))


# ---- churn


def churn(blocks: int = CHURN_BLOCKS) -> None:
    """Prints the highest resident MB of each half, and CPU us per block: each block is held by two of 8 replicas."""
    chance = random.Random(5)
    index = PrefixIndex()
    views = [view(index, "native") for _ in range(8)]
    caches: list[deque[bytes]] = [deque() for _ in views]
    room = 25_000 // EVENT_BLOCKS
    turns = blocks // EVENT_BLOCKS // 2
    sizes: list[float] = []
    cpu_ns = 0
    for turn in range(turns):
        keys = array("Q", chance.randbytes(8 * EVENT_BLOCKS)).tolist()
        arrived, gone = stored(keys, []), encode_batch(EventBatch(0.0, [BlockRemoved(list(keys), "GPU")], 0))
        began = time.process_time_ns()
        for number in (turn % 8, (turn + 1 + turn // 8 % 7) % 8):
            live(views[number], arrived)
            caches[number].append(gone)
            if len(caches[number]) > room:
                live(views[number], caches[number].popleft())
        cpu_ns += time.process_time_ns() - began
        if turn % (turns // 32) == 0:
            sizes.append(resident_bytes() / 2**20)
    index.check()
    half = len(sizes) // 2
    print([max(sizes[:half]), max(sizes[half:]), cpu_ns / 1000 / (turns * 2 * EVENT_BLOCKS)])


def live(view: CacheView, one: bytes) -> None:
    view.perform(view.stream.live(view.stream.last_seq + 1, one, 0.0))
