"""A replica's life: start the engine, serve, drain, end. Nothing that users get wrong ends in a traceback."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvloop

from api.http.server import HttpServer, Signals, connection_limits, http_server, listen
from api.process.allocator import map_large_blocks
from api.process.lifeline import die_with_parent
from api.process.tasks import first
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import load_tokenizer, read_template
from replica.config import ReplicaConfig
from replica.http.app import Endpoints, build_app
from replica.http.engine_client import EngineClient, EngineDied
from replica.messages import Hello


def serve(config: ReplicaConfig) -> int:
    """Run until told to end, and return the exit status."""
    map_large_blocks()
    if config.die_with_parent:
        die_with_parent(os.getppid())
    logging.basicConfig(level=config.engine.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    try:
        prompts = load_prompts(config)
    except (OSError, ValueError) as error:
        return _failed(str(error))
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return _failed(f"cannot listen on {config.host}:{config.port}: {reason}; choose another --port or --host")
    with listener:
        return uvloop.run(serve_on(listener, config, prompts))


def load_prompts(config: ReplicaConfig) -> Prompts:
    """ValueError or OSError, with the file's name, where one of the files cannot be used."""
    tokenizer = load_tokenizer(config.tokenizer)
    if config.chat_template is None:
        template, name = None, "the chat template"
    else:
        template, name = read_template(Path(config.chat_template)), config.chat_template
    return Prompts(tokenizer, template, config.engine.vocabulary[1], name)


async def serve_on(listener: socket.socket, config: ReplicaConfig, prompts: Prompts, **given: Any) -> int:
    """Serve until told to end, and return the exit status. `given`: signals and an engine instead of the usual ones."""
    signals = given.get("signals") or Signals()
    limits = connection_limits()
    try:
        engine = given.get("engine") or await EngineClient.spawn(config.engine)
    except OSError as error:
        return _failed(f"the engine's process cannot be started: {error}")
    app = build_app(engine, prompts, config)
    endpoints: Endpoints = app.state.endpoints
    server = http_server(app, limits)
    tasks = (
        asyncio.create_task(server.serve(sockets=[listener])),
        asyncio.create_task(_announce(engine, server, listener)),
    )
    try:
        status = await _until_the_end(engine, endpoints, signals, config.drain_timeout_s)
    finally:
        tasks[1].cancel()  # first: an engine that is ended while it loads is no failure to tell of
        await engine.close()
        server.end()
        endpoints.reader.close()
        await endpoints.checker.close()
        await asyncio.gather(*tasks, return_exceptions=True)
    return status


async def _announce(engine: EngineClient, server: HttpServer, listener: socket.socket) -> None:
    await server.listening.wait()
    host, port = listener.getsockname()[:2]
    try:
        hello = await engine.ready()
    except EngineDied as error:
        if not engine.ended:  # it says nothing; of an end `_until_the_end` tells
            logging.getLogger(__name__).error("%s", error)
            await engine.close()
        return
    with contextlib.suppress(OSError):  # nobody reads it, and the replica serves all the same
        print(ready_line(f"http://{f'[{host}]' if ':' in host else host}:{port}", hello), flush=True)


def ready_line(url: str, hello: Hello) -> str:
    events = hello.endpoints.events if hello.endpoints else "off"
    attention = f"attention {hello.attention}, " if hello.attention else ""
    cache = f"{hello.num_blocks} blocks of {hello.block_size}"
    return f"ready on {url}, model {hello.model}, {cache}, {attention}events {events}"


async def _until_the_end(engine: EngineClient, endpoints: Endpoints, signals: Signals, drain_timeout_s: float) -> int:
    died = asyncio.create_task(engine.died())
    await first(asyncio.create_task(signals.end.wait()), beside=[died])
    if not died.done():
        endpoints.metrics.draining = True
        drained = asyncio.create_task(_drained(endpoints, drain_timeout_s))
        await first(asyncio.create_task(signals.at_once.wait()), drained, beside=[died])
    if not died.done():
        died.cancel()
        return 0
    if engine.hello is None and signals.end.is_set():  # the same Ctrl-C reached it before it was on its own
        return 0
    if engine.has_said_why:
        return 1
    logging.getLogger("api.http.exchange").setLevel(logging.CRITICAL)  # no line for every stream that is cut
    return _failed(f"{died.result()}; the replica ends with it")


async def _drained(endpoints: Endpoints, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while endpoints.metrics.open_requests:
                await asyncio.sleep(0.02)
            return
    left = endpoints.metrics.open_requests
    logging.getLogger(__name__).warning("%d requests have not ended within %g s; cutting them", left, limit_s)


def _failed(message: str) -> int:
    print(f"Error: {message}", file=sys.stderr, flush=True)
    return 1
