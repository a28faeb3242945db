"""`python -m tests.hostile.clocked CONFIG`: a router that measures how long its event loop stands still.

CONFIG is JSON: the fields of a RouterConfig, and `planted`, the path of a route that is to parse its bodies in the
loop. It writes its port, and for each line that it reads the longest pause since the last one. A pause is counted in
processor time of the whole process: other processes do not count, but a thread does that keeps the interpreter.
"""

import asyncio
import contextlib
import gc
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvloop

from api.process.lifeline import die_with_parent
from router.config import RouterConfig
from router.http import front as connections
from router.process.front import Front
from router.process.server import SWITCH_S, THRESHOLD
from router.proxy.exchange import Exchange
from router.proxy.request import Request
from router.tenants.keys import keys_from_options
from tests.router.loopback import until
from tests.router.scripted import close_at_once

BEAT_S = 0.002


class Clocked:
    """The process, as a test sees it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port = process, port

    async def longest_s(self) -> float:
        """The longest pause since this was asked last."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return float(await self._line())

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        return await asyncio.wait_for(self.process.stdout.readline(), 30)


@asynccontextmanager
async def clocked(**config: Any) -> AsyncIterator[Clocked]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "tests.hostile.clocked", json.dumps(config))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield Clocked(process, int(await asyncio.wait_for(process.stdout.readline(), 30)))
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 30)


# ---- within the process


async def serve(config: dict[str, Any]) -> None:
    planted, keys = config.pop("planted", None), keys_from_options(config.pop("keys", ()), None)
    made = msgspec.convert(config, RouterConfig)
    made = msgspec.structs.replace(made, keys=tuple(keys), demand_key=bool(keys))
    if planted is not None:
        plant(planted)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        front = Front(made, listener)
        await front.start()
        members = front.router.members
        await until(lambda: all(one.candidate.unavailable is None for one in members) and len(members), "all serve")
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLD)
        print(listener.getsockname()[1], flush=True)
        await answer()
        await close_at_once(front)


async def answer() -> None:
    reader, longest_s = asyncio.StreamReader(), 0.0
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    asked = asyncio.ensure_future(reader.readline())
    before_s = time.process_time()
    while not asked.done() or asked.result():
        await asyncio.sleep(BEAT_S)
        now_s = time.process_time()
        longest_s, before_s = max(longest_s, now_s - before_s), now_s
        if asked.done() and asked.result():
            print(longest_s, flush=True)
            longest_s, asked = 0.0, asyncio.ensure_future(reader.readline())


def plant(path: str) -> None:
    """Have one route parse its bodies where all of them are served."""
    served = vars(connections)["read"]

    def parses_first(request: Request, exchange: Exchange) -> None:
        if exchange.scope["path"] == path:
            for _ in range(3):  # once is about as long as the longest pause that is allowed
                with contextlib.suppress(ValueError):
                    json.loads(bytes(exchange.body))
        served(request, exchange)

    vars(connections)["read"] = parses_first


if __name__ == "__main__":
    die_with_parent(os.getppid())
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(serve(json.loads(sys.argv[1])))
