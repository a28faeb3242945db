"""The router's process: listen, serve, drain, end. User errors never end in a traceback."""

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import uvloop

from api.http.server import Signals, listen
from api.process.allocator import map_large_blocks
from api.process.cpus import usable_cpus
from api.process.tasks import first
from router.config import RouterConfig
from router.process.front import Front
from router.tenants.usage import prepare
from router.workers.peer_names import parse_endpoint
from router.workers.processes import BEAT_S, Place, Processes

THRESHOLD = (50_000, 20, 50)  # the garbage collector's thresholds
SWITCH_S = 0.001  # how long a thread that reads a long body may keep all clients waiting


def serve(config: RouterConfig) -> int:
    """Serve until told to end, and return the exit status."""
    map_large_blocks()
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # it warns of every try to reach a lost collector
    if config.otlp_endpoint is not None:
        import router.records.tracing  # an extra: if it is missing, this process says so, not each worker
    if config.picker_listen is not None:
        import router.http.picker.server  # noqa: F401  # likewise
    if config.usage_db is not None:
        prepare(config.usage_db)  # once, before there are several workers
    try:
        if (workers := workers_of(config)) > 1:
            first = None if config.workers else 1
            processes = Processes(config.host, config.port, workers, partial(_serve_part, config), first)
            return processes.run(partial(_say, config))
        listener = listen(config.host, config.port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return _failed(f"cannot listen on {config.host}:{config.port}: {reason}; choose another --port or --host")
    with listener:
        return uvloop.run(_serve(config, listener, lambda _: _say(config, listener)))


def _serve_part(config: RouterConfig, place: Place, listener: socket.socket, say_alive: Callable[[int], None]) -> int:
    """The life of one of several workers."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s worker {place.number}: %(message)s"))
    return uvloop.run(_serve(with_others(config, place), listener, say_alive, place))


def _say(config: RouterConfig, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.tls_cert else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    with suppress(OSError):  # the router serves even if nobody reads stdout
        print(f"router on {url}\ndashboard on {url}/dashboard", flush=True)


async def _serve(
    config: RouterConfig, listener: socket.socket, say_alive: Callable[[int], None], place: Place | None = None
) -> int:
    signals = Signals()

    async def beat(place: Place) -> None:
        while True:
            took_s, began_s = time.thread_time(), time.monotonic()
            await asyncio.sleep(BEAT_S)
            say_alive(min(100, round(100 * (time.thread_time() - took_s) / (time.monotonic() - began_s))))
            front.divide(place.serving[0])

    try:
        front = Front(config, listener, place)
    except (OSError, ValueError) as error:
        return _failed(str(error))
    try:
        starting = asyncio.create_task(front.start())
        await first(asyncio.create_task(signals.end.wait()), beside=[starting])
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return 0
        starting.result()
        gc.collect()
        gc.freeze()  # these objects stay; requests leave no cycles behind, so the collector has little to find
        gc.set_threshold(*THRESHOLD)
        say_alive(0)
        if front.picker is not None:
            with suppress(OSError):
                print(f"picker on {front.picker.address}", flush=True)
        beats = None if place is None else asyncio.create_task(beat(place))
        await first(asyncio.create_task(signals.end.wait()), beside=front.tasks)
        front.check()
        drained = asyncio.create_task(front.drain(config.drain_timeout_s))
        await first(asyncio.create_task(signals.at_once.wait()), beside=[drained])
        left = drained.result() if drained.done() else front.router.lifecycle.open_requests
        drained.cancel()
        if left:
            logging.getLogger(__name__).warning("%d requests have not ended; cutting them", left)
        if beats is not None:
            beats.cancel()
    finally:
        await front.close()
    return 0


def _failed(message: str) -> int:
    print(f"Error: {message}", file=sys.stderr, flush=True)
    return 1


MAX_BY_ITSELF = 4


def workers_of(config: RouterConfig) -> int:
    """The most workers. Peers on other machines have to know the number, so with those there is one unless told.

    There is one for gateways, whose few connections could not be shared out evenly.
    """
    if config.workers:
        return config.workers
    is_single = config.peer_listen is not None or config.picker_listen is not None
    return 1 if is_single else min(MAX_BY_ITSELF, usable_cpus())


def with_others(config: RouterConfig, place: Place) -> RouterConfig:
    """Each worker has the next port where there are other routers."""
    listen, numbers = config.peer_listen, range(place.workers)
    return msgspec.structs.replace(
        config,
        message_cache_bytes=config.message_cache_bytes // place.serving[0],
        peer_listen=listen and _next(listen, place.number),
        peers=tuple(_next(peer, number) for peer in config.peers for number in numbers),
    )


def _next(endpoint: str, number: int) -> str:
    found = parse_endpoint(endpoint)
    if found is None:
        return f"{endpoint}-{number}"
    host, port = found
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port + number}"
