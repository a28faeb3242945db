"""A small HTTP server on the loopback, in place of another process."""

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import pytest

DEADLINE_S = 50.0  # none of what is awaited takes this long, whatever else the machine does


OPENSSL = shutil.which("openssl")
with_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed, which makes the certificates")


def certificate(folder: Path, name: str = "cert") -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = f"{OPENSSL} req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=h -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


class Request(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Reply:
    """A handler's response; one for each connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def whole(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{named}\r\n"
        await self._write(head.encode() + body)

    async def begin(self) -> None:
        await self._write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")

    async def line(self, content: Any) -> None:
        await self.chunk(json.dumps(content).encode() + b"\n")

    async def chunk(self, chunk: bytes) -> None:
        await self._write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    async def end(self) -> None:
        await self._write(b"0\r\n\r\n")

    def drop(self) -> None:
        self._writer.transport.abort()

    async def _write(self, content: bytes) -> None:
        self._writer.write(content)
        await self._writer.drain()


Handler = Callable[[Request, Reply], Awaitable[None]]


@asynccontextmanager
async def serving(
    handle: Handler, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """URL of a running server; its open handlers are cancelled at the end."""
    running: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await handle(await _read(reader), Reply(writer))
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, host, port, ssl=tls)
    try:
        yield f"http{'s' if tls else ''}://{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running)


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    return Request(method, url.path, dict(parse_qsl(url.query)), headers, body)


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what
