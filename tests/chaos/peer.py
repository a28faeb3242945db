"""Real processes for the chaos tests: a publisher under load, a subscriber, and a lossy proxy between them.

Each reads commands as JSON lines on stdin and answers each with one JSON line on stdout.
"""

import argparse
import asyncio
import json
import random
import sys
import threading
import time
from collections import OrderedDict
from typing import Any

import msgspec
import zmq

from events.blocks import block_keys, root_key
from events.cache.pool import fold
from events.messages import BlockRemoved, BlockStored, KnownEvent
from events.native import Load
from events.publisher import Publisher, PublisherConfig
from events.source import Source
from events.subscriber import Subscriber

BLOCK = 16
ROOT = root_key("m", None, None, BLOCK)


class Cache:
    """A small LRU cache that says which blocks it stores and removes."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.blocks = blocks
        self.keys: OrderedDict[int, None] = OrderedDict()
        self.random = random.Random(seed)

    def step(self) -> list[KnownEvent]:
        tokens = [self.random.randrange(50_000) for _ in range(BLOCK * self.random.randint(1, 8))]
        keys = block_keys(tokens, BLOCK, ROOT)
        events: list[KnownEvent] = [BlockStored(keys, None, tokens, BLOCK, None, "GPU", None)]  # type: ignore[arg-type]
        self.keys.update(dict.fromkeys(keys))
        surplus = [self.keys.popitem(last=False)[0] for _ in range(len(self.keys) - self.blocks)]
        if surplus:
            events.insert(0, BlockRemoved(surplus, "GPU"))  # type: ignore[arg-type]
        return events


class PublisherPeer:
    def __init__(self, config: dict[str, Any], cache_blocks: int, rate: float, seed: int) -> None:
        self.publisher = Publisher(PublisherConfig(**config))
        self.cache = Cache(cache_blocks, seed)
        self.rate = rate
        self.lock = threading.Lock()
        self.published = 0
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        due = reported = time.monotonic()
        while True:
            now = time.monotonic()
            with self.lock:
                while self.rate and due <= now:
                    due += 1 / self.rate
                    self.publisher.publish(self.cache.step())
                    self.published += 1
                if now - reported >= 0.2:
                    reported = now
                    self.publisher.report(Load())
            due = max(due, now - 1)
            time.sleep(0.002)

    def answer(self, command: str, value: Any) -> dict[str, Any]:
        if command == "rate":
            with self.lock:
                self.rate = value
        with self.lock:
            state = {"seq": self.published - 1, "blocks": len(self.cache.keys), "xor": fold(self.cache.keys)}
        return {**state, **msgspec.to_builtins(self.publisher.endpoints)}


async def subscribe(sources: list[dict[str, Any]]) -> None:
    async with Subscriber() as subscriber:
        views = [subscriber.add(Source(**source)) for source in sources]
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            states = []
            for view in views:
                digest = view.resolver.digest()
                state = {"inexact": view.inexact, "seq": view.stream.last_seq, "blocks": digest.blocks}
                xor = digest.xor if command["command"] == "digest" else None
                states.append({**state, "xor": xor, "stats": msgspec.to_builtins(view.stream.stats)})
                if command["command"] == "digest":
                    view.resolver.check()
            say({"views": states})


def proxy(upstream: str, loss: float, seed: int) -> None:
    """Passes batches on, but loses some. A new publisher behind it is not seen as a new connection."""
    context = zmq.Context()
    source, sink = context.socket(zmq.SUB), context.socket(zmq.PUB)
    source.subscribe(b"")
    source.connect(upstream)
    sink.bind("tcp://127.0.0.1:0")
    lost = 0
    chance = random.Random(seed)
    poller = zmq.Poller()
    poller.register(source, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if source in ready:
            frames = source.recv_multipart()
            if chance.random() < loss:
                lost += 1
            else:
                sink.send_multipart(frames)
        if sys.stdin.fileno() in ready:
            line = sys.stdin.readline()
            if not line:
                return
            command = json.loads(line)
            if command["command"] == "loss":
                loss = command["value"]
            say({"endpoint": sink.getsockopt_string(zmq.LAST_ENDPOINT), "lost": lost})


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["publisher", "subscriber", "proxy"])
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args()
    if arguments.role == "subscriber":
        asyncio.run(subscribe(arguments.settings))
    elif arguments.role == "proxy":
        proxy(**arguments.settings)
    else:
        peer = PublisherPeer(**arguments.settings)
        for line in sys.stdin:
            command = json.loads(line)
            say(peer.answer(command["command"], command.get("value")))


if __name__ == "__main__":
    main()
