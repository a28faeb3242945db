"""A stand-in process for many native replicas: their HTTP control and their caches' events, without an engine.

    python -m tests.bench.publishing REPLICAS BLOCKS

prints one JSON line with their URLs. GET /first of any of them says when the router first connected since GET /forget,
by the monotonic clock that all processes share.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from api.tokens.tokenizer import ByteTokenizer
from events.blocks import block_keys, root_key
from events.messages import BlockStored
from events.native import Load
from events.publisher import Publisher, PublisherConfig
from tests.router.loopback import Reply, Request, serving

MODEL = "demo"
BLOCK = 16
CHAIN_BLOCKS = 50  # blocks of one prompt
REPORT_S = 0.25
ANY = "tcp://127.0.0.1:0"


class StandIn:
    """One replica."""

    connected_s: float | None = None  # of all of them: when the router was first heard

    def __init__(self, number: int, blocks: int) -> None:
        topic = f"kv@r{number}@{MODEL}"
        self.publisher = Publisher(PublisherConfig(ANY, ANY, ANY, ANY, topic=topic, model=MODEL))
        self.blocks = blocks
        self.loaded = {
            "model": MODEL,
            "block_size": BLOCK,
            "max_model_len": 8192,
            "tokenizer": ByteTokenizer.name,
            "topic": topic,
            "incarnation": self.publisher.incarnation,
            "endpoints": msgspec.to_builtins(self.publisher.endpoints),
            "pool": {"total": blocks},
        }
        root = root_key(MODEL, None, None, BLOCK)
        for first in range(0, blocks, CHAIN_BLOCKS):
            count = min(CHAIN_BLOCKS, blocks - first)
            tokens = [(number // 2 * 7919 + first * BLOCK + place) % 256 for place in range(count * BLOCK)]
            tokens[:4] = [number // 2, first >> 16, first >> 8 & 255, first & 255]  # every two have the same prompts
            keys = block_keys(tokens, BLOCK, root)
            self.publisher.publish([BlockStored(keys, None, tokens, BLOCK, None, "GPU", None)])  # type: ignore[arg-type]

    async def handle(self, request: Request, reply: Reply) -> None:
        if StandIn.connected_s is None and request.path not in ("/first", "/forget"):
            StandIn.connected_s = time.monotonic()
        match request.path:
            case "/load":
                await reply.whole(200, self.loaded)
            case "/ready":
                await reply.whole(200, {})
            case "/first":
                await reply.whole(200, StandIn.connected_s)
            case "/forget":
                StandIn.connected_s = None
                await reply.whole(200, {})
            case _:
                await reply.whole(404, {"error": {"code": "not_found"}})

    async def report(self) -> None:
        while True:
            self.publisher.report(Load())
            await asyncio.sleep(REPORT_S)


async def stand_in(replicas: int, blocks: int) -> None:
    async with AsyncExitStack() as stack:
        ones = [StandIn(number, blocks) for number in range(replicas)]
        urls = [await stack.enter_async_context(serving(one.handle)) for one in ones]
        while any(one.publisher.stats.batches < blocks // CHAIN_BLOCKS and one.publisher.seq < 0 for one in ones):
            await asyncio.sleep(0.01)
        answer: dict[str, Any] = {"urls": urls}
        print(json.dumps(answer), flush=True)
        await asyncio.gather(*(one.report() for one in ones))


if __name__ == "__main__":
    asyncio.run(stand_in(int(sys.argv[1]), int(sys.argv[2])))
