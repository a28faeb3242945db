"""Runs a controller: its loop and its HTTP server, from start to end."""

import asyncio
import socket

from api.http.server import connection_limits, http_server
from fleet.control.app import build_app
from fleet.control.controller import Controller
from fleet.tasks import check, first


class Serving:
    """A served controller: `start` it in a running loop; `ended` returns once the fleet has ended."""

    def __init__(self, controller: Controller, listener: socket.socket, key: str) -> None:
        self.controller = controller
        self._listener = listener
        self._server = http_server(build_app(controller, key), connection_limits())
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[self._listener])),
            asyncio.create_task(self.controller.run()),
        ]
        await first(asyncio.create_task(self._server.listening.wait()), beside=self._tasks)
        check(self._tasks)

    async def ended(self) -> None:
        """Raise the error of a task that has failed."""
        await first(asyncio.create_task(self.controller.ended.wait()), beside=self._tasks)
        check(self._tasks)

    async def close(self) -> None:
        self.controller.registry.close()
        self._server.end()
        serving, running = self._tasks
        await asyncio.gather(serving, return_exceptions=True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        self._listener.close()
