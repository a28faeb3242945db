"""The router's process: listen, serve, drain, end. User errors never end in a traceback."""

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from contextlib import suppress

import uvloop

from api.allocator import map_large_blocks
from api.http.server import Signals, listen
from router.config import RouterConfig
from router.front import Front

SWITCH_S = 0.001  # how long a thread that reads a long body may keep all clients waiting


def serve(config: RouterConfig) -> int:
    """Serve until told to end, and return the exit status."""
    map_large_blocks()
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and end are reported here
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # it warns of every try to reach a lost collector
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return _failed(f"cannot listen on {config.host}:{config.port}: {reason}; choose another --port or --host")
    with listener:
        return uvloop.run(_serve(config, listener))


async def _serve(config: RouterConfig, listener: socket.socket) -> int:
    signals = Signals()
    try:
        front = Front(config, listener)
    except (OSError, ValueError) as error:
        return _failed(str(error))
    try:
        await front.start()
        gc.collect()
        gc.freeze()  # what is there now stays; requests leave no cycles behind, so the collector has little to find
        gc.set_threshold(50_000, 20, 50)
        host, port = listener.getsockname()[:2]
        scheme = "https" if config.tls_cert else "http"
        with suppress(OSError):  # without a reader of stdout, the router still serves
            url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
            print(f"router on {url}\ndashboard on {url}/dashboard", flush=True)
        await _first(signals.end.wait(), front.failed())
        front.check()
        drained = asyncio.create_task(front.drain(config.drain_timeout_s))
        await _first(signals.at_once.wait(), _done(drained))
        left = drained.result() if drained.done() else front.router.open_requests
        drained.cancel()
        if left:
            logging.getLogger(__name__).warning("%d requests have not ended; cutting them", left)
    finally:
        await front.close()
    return 0


async def _done(task: "asyncio.Task[int]") -> None:
    await asyncio.wait([task])


async def _first(*waits: Coroutine[None, None, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _failed(message: str) -> int:
    print(f"Error: {message}", file=sys.stderr, flush=True)
    return 1
