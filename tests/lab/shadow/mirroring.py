"""Proxies that send every request on, and a copy of it to shadow: nginx as users configure it, or a small one.

`python -m tests.lab.shadow.mirroring PORT UPSTREAM_PORT SHADOW_PORT` runs the small one.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from lab.shadow.findings import Findings
from tests.chaos.replicas import free_ports
from tests.events.processes import wait_until
from tests.replica.serving import Replica

NGINX = os.environ.get("WARMROUTE_NGINX") or shutil.which("nginx")
CONFIG = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_body_buffer_size 8m;
    client_max_body_size 32m;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            mirror /shadow;
            proxy_pass http://127.0.0.1:{upstream};
            proxy_http_version 1.1;
            proxy_buffering off;
        }}
        location = /shadow {{
            internal;
            proxy_pass http://127.0.0.1:{shadow}$request_uri;
            proxy_set_header X-Request-Id $request_id;
        }}
    }}
}}
"""


class Mirroring(Replica):
    """A proxy as a process of its own."""

    def __init__(self, command: list[str], port: int) -> None:
        self._given_port = port
        self._start(command)

    @property
    def port(self) -> int:
        return self._given_port

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.err
        with suppress(OSError):
            return self.get("/v1/models").status == 200
        return False


@contextmanager
def mirroring(upstream: int, shadow: int, *, nginx: bool = False) -> Iterator[Mirroring]:
    port = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="mirroring-") as folder:
        command = [sys.executable, "-m", "tests.lab.shadow.mirroring", str(port), str(upstream), str(shadow)]
        if nginx:
            assert NGINX is not None, "its caller has looked"
            path = Path(folder) / "nginx.conf"
            path.write_text(CONFIG.format(folder=folder, port=port, upstream=upstream, shadow=shadow))
            command = [NGINX, "-p", folder, "-c", str(path)]
        running = Mirroring(command, port)
        try:
            wait_until(running.is_ready, "the mirror is ready")
            yield running
        finally:
            running.process.terminate()
            running.end(None)


class Shadow(Replica):
    """`warmroute shadow --json`, which prints its findings when it ends."""

    def __init__(self, *options: object) -> None:
        self._start([sys.executable, "-m", "fleet", "shadow", "--json", *map(str, options)])

    def has_said(self, text: str) -> bool:
        assert self.process.poll() is None, self.err
        return any(text in line for line in self.err)

    def is_watching(self) -> bool:
        return self.has_said("following")

    @property
    def port(self) -> int:
        return int(next(line for line in self.err if line.startswith("following")).rpartition(":")[2])

    def findings(self) -> Findings:
        """End it, unless it ends by itself, and return what it has found."""
        assert self.end(signal.SIGINT) == 0, self.err
        return msgspec.json.decode(self.out.get(), type=Findings)


@contextmanager
def shadow(*options: object) -> Iterator[Shadow]:
    running = Shadow(*options)
    try:
        wait_until(running.is_watching, "shadow follows the replicas")
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.end(None)


# ---- the small one


async def _serve(port: int, upstream: int, shadow: int) -> None:
    copies: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            request = await read_request(reader)
            copy = asyncio.create_task(_copied(request, shadow))
            copies.add(copy)
            copy.add_done_callback(copies.discard)
            answers, asks = await asyncio.open_connection("127.0.0.1", upstream)
            asks.write(request)
            while data := await answers.read(65536):
                writer.write(data)
                await writer.drain()
            asks.close()
        writer.close()  # as the answer says

    server = await asyncio.start_server(handle, "127.0.0.1", port)
    await server.serve_forever()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(b"connection:")]
    length = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
    return b"\r\n".join([*lines, b"connection: close", b"", await reader.readexactly(length)])


async def _copied(request: bytes, shadow: int) -> None:
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", shadow)
        writer.write(request)
        await reader.read()
        writer.close()


if __name__ == "__main__":
    asyncio.run(_serve(*map(int, sys.argv[1:4])))
