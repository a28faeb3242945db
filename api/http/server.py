"""A server of HTTP/1 connections, and how its process listens and ends."""

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

import msgspec
from starlette.types import ASGIApp

from api.http.connection import Connections, HttpConnection, Limits
from api.http.exchange import AsgiConnection

CLOSING_LIMIT_S = 1.0  # the time for answers that were cut short to reach their clients
CLOSING_LOOK_S = 0.01
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


class HttpServer:
    """Serves connections on sockets that are already bound, until `end` is called."""

    def __init__(self, connect: Callable[[Connections], HttpConnection], tls: ssl.SSLContext | None = None) -> None:
        self.connections = Connections()
        self.listening = asyncio.Event()
        self._connect = partial(connect, self.connections)
        self._tls = tls
        self._ends = asyncio.Event()

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(self._connect, sock=each, ssl=self._tls, backlog=BACKLOG) for each in sockets
        ]
        self.listening.set()
        try:
            while not self._ends.is_set():
                await _within(SWEEP_S, self._ends.wait())
                for connection in list(self.connections.open):
                    connection.end_if_overdue(loop.time())
        finally:
            for server in servers:
                server.close()
        for connection in list(self.connections.open):
            connection.shutdown()
        # What is left then is cut off, and its requests end by themselves.
        await _within(CLOSING_LIMIT_S, self._all_over())
        for connection in self.connections.open:
            connection.transport.abort()
        await _within(CLOSING_LIMIT_S, self._all_over())
        for task in self.connections.tasks:
            task.cancel()

    async def _all_over(self) -> None:
        while self.connections.open or self.connections.tasks:
            await asyncio.sleep(CLOSING_LOOK_S)

    def end(self) -> None:
        self._ends.set()

    def retire(self, *, now: bool) -> None:
        """Close connections after their open response: those that can still announce it, or all of them with `now`."""
        self.connections.retiring = True
        for connection in list(self.connections.open):
            connection.retire(now=now)


async def _within(limit_s: float, work: Coroutine[None, None, object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await work


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


def http_server(app: ASGIApp, limits: Limits = Limits()) -> HttpServer:  # noqa: B008 - frozen
    return HttpServer(partial(AsgiConnection, limits=limits, app=app))


def tls_context(certificate: str, key: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
