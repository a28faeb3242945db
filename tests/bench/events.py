"""Measure the event path: bytes to resolver, publishing, matching, memory."""

import asyncio
import functools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import zmq

from events.blocks import block_keys, pack_tokens, root_key
from events.cache.resolver import Resolver
from events.messages import BlockRemoved, BlockStored, Decoder, EventBatch, ExtraKeys, Hash, KnownEvent, encode_batch
from events.native import Load
from events.publisher import Publisher, PublisherConfig
from events.source import Source
from router.members.feed import Feeds
from router.placement.index import PrefixIndex
from tests.bench.measure import calls, cpu_us, heading, resident_bytes, row, rows_of_calls

BLOCK = 16
ROOT = root_key("m", None, None, BLOCK)
MEMORY_BLOCKS = 1_000_000


def run(rounds: int) -> None:
    heading("bytes to resolver, 16-token blocks, CPU per block")
    ingest(rounds)
    print()
    heading("publishing, batches of 32 one-block events, CPU per event")
    publish(rounds)
    print()
    heading("keys and match of a prompt of 4,096 tokens (256 blocks), all held, among 1,000,000 blocks; CPU per prompt")
    match(rounds)
    print()
    heading(f"resident memory of a resolver per block at {MEMORY_BLOCKS:,} blocks")
    for kind, target in (("native", "180"), ("foreign int", "320"), ("foreign bytes", "320")):
        command = [sys.executable, "-c", f"from tests.bench.events import memory; memory({kind!r})"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        row(f"{kind} hashes", [json.loads(result.stdout)], "B", f"<= {target}")
    print()
    heading("a foreign event of 4 blocks, from the socket to the router's index")
    asyncio.run(followed())


async def followed() -> None:
    hashes: list[Hash] = [2**40 + number for number in range(8)]
    tokens = list(range(8 * BLOCK))
    any_port = "tcp://127.0.0.1:*"
    with Publisher(PublisherConfig(any_port, any_port, any_port, any_port, model="m")) as publisher:
        index = PrefixIndex()
        feeds = Feeds(index, lambda *_: None)
        try:
            source = Source("?", publisher.endpoints.events, publisher.endpoints.replay, model="m")
            feed = feeds.follow("a", index.add(), source)
            for seq in (0, 1):  # the first one connects
                begin, end = 4 * seq, 4 * seq + 4
                parent = hashes[begin - 1] if begin else None
                own = tokens[begin * BLOCK : end * BLOCK]
                publisher.publish([BlockStored(hashes[begin:end], parent, own, BLOCK, None, "GPU", None)])
                with calls() as made:
                    while feed.view.stream.last_seq < seq:
                        await asyncio.sleep(0.001)
            rows_of_calls("it", made)
        finally:
            feeds.close()


# ---- bytes to resolver


def payload(blocks: int, chance: random.Random, kind: str) -> bytes:
    tokens = [chance.randrange(150_000) for _ in range(BLOCK * blocks)]
    hashes: list[Hash]
    if kind == "native":
        hashes = list(block_keys(tokens, BLOCK, ROOT))
    elif kind == "foreign bytes":
        hashes = [chance.randbytes(32) for _ in range(blocks)]
    else:
        hashes = [chance.getrandbits(64) for _ in range(blocks)]
    extras: ExtraKeys | None = None if kind == "native" else [None] * blocks  # as vLLM sends it
    event = BlockStored(hashes, None, tokens, BLOCK, None, "GPU", None, extras, 0, "full_attention")
    return encode_batch(EventBatch(1e9, [event], 0))


def ingest(rounds: int) -> None:
    chance = random.Random(1)
    for blocks, events in ((64, 2000), (1, 20_000)):
        for kind in ("foreign int", "foreign bytes", "native"):
            payloads = [payload(blocks, chance, kind) for _ in range(events)]
            target = {64: "<= 1.3 us, try for 1.0", 1: "<= 6 us"}[blocks] if kind == "foreign int" else ""
            figures = cpu_us(functools.partial(reading, payloads, kind), blocks * events, rounds)
            row(f"{blocks}-block events, {kind} hashes", figures, "us", target)
        floor = [payload(blocks, chance, "foreign int") for _ in range(events)]
        decoded = cpu_us(lambda payloads=floor: functools.partial(decoding, payloads), blocks * events, rounds)  # type: ignore[misc]
        row(f"{blocks}-block events, msgspec decoding alone (the floor)", decoded, "us")


def reading(payloads: list[bytes], kind: str) -> Callable[[], object]:
    native = kind == "native"
    decoder, resolver = Decoder(skim=native), Resolver("m", native=native)

    def work() -> None:
        for one in payloads:
            resolver.apply(decoder.decode(one).events)

    return work


def decoding(payloads: list[bytes]) -> None:
    decode = Decoder().decode
    for one in payloads:
        decode(one)


# ---- publishing


def publish(rounds: int) -> None:
    """Measure publishing to one subscriber in another process, as in a cluster."""
    batches = [stored_batch(32, seed) for seed in range(1000)]
    own: list[float] = []
    total: list[float] = []
    plain: list[float] = []
    for _ in range(rounds):
        on_engine, in_all = published(batches, mirror=True)
        own.append(on_engine)
        total.append(in_all)
        plain.append(published(batches, mirror=False)[1])
    row("on the engine's thread", own, "us", "<= 1")
    row("whole process, native (mirror for snapshots and digest)", total, "us", "vLLM 0.6-1.1")
    row("whole process, as vLLM does (no mirror)", plain, "us", "vLLM 0.6-1.1")
    encoded = [EventBatch(1e9, list(batch), 0) for batch in batches]
    row("encoding alone (the floor)", cpu_us(lambda: lambda: [encode_batch(b) for b in encoded], 32_000, rounds), "us")


def stored_batch(events: int, seed: int) -> list[KnownEvent]:
    chance = random.Random(seed)
    batch: list[KnownEvent] = []
    for _ in range(events // 2):
        tokens = [chance.randrange(150_000) for _ in range(BLOCK)]
        keys: list[Hash] = list(block_keys(tokens, BLOCK, ROOT))
        batch += [BlockStored(keys, None, tokens, BLOCK, None, "GPU", None), BlockRemoved(keys, "GPU")]
    return batch


def published(batches: list[list[KnownEvent]], *, mirror: bool) -> tuple[float, float]:
    any_port = "tcp://127.0.0.1:0"
    native = any_port if mirror else None
    config = PublisherConfig(any_port, any_port, native, native, high_water_mark=0)
    with Publisher(config) as publisher, subscriber_process(publisher.endpoints.events) as consumer:
        assert consumer.stdout is not None
        publisher.publish(batches[0])
        while publisher.stats.batches < 1 or not subscribed(publisher, batches[0], consumer):
            time.sleep(0.01)
        began, process = publisher.stats.batches, time.process_time_ns()
        thread = time.thread_time_ns()
        for batch in batches:
            publisher.publish(batch)
        publisher.report(Load())
        thread = time.thread_time_ns() - thread
        while publisher.stats.batches < began + len(batches):
            time.sleep(0.001)
        process = time.process_time_ns() - process
        consumer.terminate()
    events = len(batches) * len(batches[0])
    return thread / 1000 / events, process / 1000 / events


def subscriber_process(endpoint: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", f"from tests.bench.events import consume; consume({endpoint!r})"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def consume(endpoint: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.SUB)
    socket.rcvhwm = 0
    socket.subscribe(b"")
    socket.connect(endpoint)
    socket.recv_multipart()
    print("subscribed", flush=True)
    while True:
        socket.recv_multipart()


def subscribed(publisher: Publisher, batch: list[KnownEvent], consumer: "subprocess.Popen[str]") -> bool:
    publisher.publish(batch)
    poller = zmq.Poller()
    poller.register(consumer.stdout, zmq.POLLIN)
    return bool(poller.poll(10))


# ---- matching and memory


def match(rounds: int) -> None:
    chance = random.Random(2)
    resolver = Resolver("m", native=True)
    tokens = [chance.randrange(150_000) for _ in range(4096)]
    packed = pack_tokens(tokens)
    keys: list[Hash] = list(block_keys(tokens, BLOCK, ROOT))
    others: list[Hash] = [chance.getrandbits(64) for _ in range(MEMORY_BLOCKS)]
    resolver.naming.verified = True
    resolver.apply([BlockStored(part, 1, [], BLOCK, None, "GPU", None) for part in (keys, others)])

    def matching(prompt: bytes | list[int]) -> Callable[[], object]:
        def work() -> None:
            for _ in range(200):
                assert resolver.matched(block_keys(prompt, BLOCK, ROOT)) == 256

        return work

    row("from packed tokens", cpu_us(lambda: matching(packed), 200, rounds), "us", "<= 50 us")
    row("from a list", cpu_us(lambda: matching(tokens), 200, rounds), "us", "<= 90 us")


def memory(kind: str) -> None:
    """Prints the bytes per block; runs in a process of its own."""
    chance = random.Random(3)
    resolver, decoder = Resolver("m", native=kind == "native"), Decoder(skim=kind == "native")
    resolver.apply(decoder.decode(payload(64, chance, kind)).events)
    before = resident_bytes()
    for _ in range(MEMORY_BLOCKS // 64):
        resolver.apply(decoder.decode(payload(64, chance, kind)).events)
    print(msgspec.json.encode((resident_bytes() - before) / MEMORY_BLOCKS).decode())
