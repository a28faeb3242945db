"""uvicorn with the limits of `connection`, on a socket that is already bound."""

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import uvicorn

from api.http.connection import HttpProtocol, Limits, State

KEEP_ALIVE_S = 75  # longer than routers and clients keep idle connections, so that none is closed under a request
CLOSING_LIMIT_S = 1  # the time for answers that were cut short to reach their clients
TICKS_PER_SWEEP = 10  # uvicorn counts ten a second
SWEEP_S = 1.0
OWN_FILES = 128  # files that are no connections, or spare ones
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def hold(host: str, port: int, *, first: bool) -> socket.socket:
    """Keep a port for several listeners of this process, among which the kernel divides connections.

    Only the `first` has to find it free: a second server must not take a part of another one's connections.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, kind, protocol)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not first:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
        if first:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        held.close()
        raise
    return held


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handlers: a replica drains first."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._ends = asyncio.Event()
        super().__init__(config)
        self.server_state: State = State()
        self.listening = asyncio.Event()

    @property
    def should_exit(self) -> bool:
        return self._ends.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        (self._ends.set if value else self._ends.clear)()

    async def main_loop(self) -> None:
        """As uvicorn's, which wakes ten times a second to see whether it should end."""
        counter = 0
        while not await self.on_tick(counter):
            counter += TICKS_PER_SWEEP
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._ends.wait()

    async def on_tick(self, counter: int) -> bool:
        now_s = asyncio.get_running_loop().time()
        for connection in self._connections():
            connection.end_if_overdue(now_s)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Uvicorn cancels what is left then, which ends in a traceback each; a request without a client ends by itself.
        cut = asyncio.get_running_loop().call_later(CLOSING_LIMIT_S, self._cut)
        await super().shutdown(sockets)
        cut.cancel()

    def retire(self, *, now: bool) -> None:
        """Close connections after their open response: those that can still announce it, or all of them with `now`."""
        self.server_state.retiring = True
        for connection in self._connections():
            connection.retire(now=now)

    @property
    def is_sending(self) -> bool:
        """Tell whether clients have yet to read a part of what was answered."""
        return any(connection.transport.get_write_buffer_size() for connection in self._connections())

    def _cut(self) -> None:
        for connection in self._connections():
            connection.abort()

    def _connections(self) -> list[HttpProtocol]:
        return [connection for connection in self.server_state.connections if isinstance(connection, HttpProtocol)]

    async def serve_accepted(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted."""
        config, state = self.config, self.lifespan.state

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(config=config, server_state=self.server_state, app_state=state)  # type: ignore[call-arg]

        with contextlib.suppress(OSError):  # its client has left, or speaks no TLS
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection, ssl=config.ssl)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Signals:
    """Waits for signals: the first SIGTERM or SIGINT asks to end, the second to end at once."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.at_once = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._take)

    def _take(self) -> None:
        (self.at_once if self.end.is_set() else self.end).set()


def connection_limits(most: int | None = None) -> Limits:
    """Limits for as many connections as open files allow; the file limit is raised to the maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    usual = Limits() if most is None else Limits(connections=most)
    if hard == resource.RLIM_INFINITY:
        return usual
    return msgspec.structs.replace(usual, connections=max(1, min(usual.connections, hard - OWN_FILES)))


def http_server(app: object, limits: Limits = Limits(), protocol: object = None, **options: Any) -> HttpServer:  # noqa: B008
    """A server. `protocol` makes its connections, as HttpProtocol does; `options` are uvicorn's."""
    return HttpServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=protocol or partial(HttpProtocol, limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSING_LIMIT_S + 1,
            backlog=BACKLOG,
            **options,
        )
    )
