"""A fleet as users run it, with conversations on it, which is changed by the commands as users give them."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from tests.chaos.conversations import Conversations
from tests.fleet.test_up import Up, starting

DEADLINE_S = 60.0
LOOK_S = 0.03


class Watched:
    """The controller's statuses of the model, accumulated over many polls."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {}
        self.incarnations: set[str] = set()
        self.fewest_ready = 10_000
        self.most = 0  # including replicas that start or leave

    async def look(self, controller: str) -> None:
        async with httpx2.AsyncClient(base_url=controller, timeout=DEADLINE_S, trust_env=False) as http:
            while True:
                view = (await http.get("/fleet")).json()
                [self.now] = view["models"]
                self.incarnations = {str(each.get("incarnation")) for each in view["replicas"]}
                self.fewest_ready = min(self.fewest_ready, self.now["ready"])
                self.most = max(self.most, self.now["replicas"])
                await asyncio.sleep(LOOK_S)


class Rolled:
    """A fleet with conversations on it, and the observations of both."""

    def __init__(self, running: Up, runtime: Path, talking: Conversations, watched: Watched) -> None:
        self.running = running
        self.talking = talking
        self.watched = watched
        self._runtime = runtime

    async def warmroute(self, *words: str) -> str:
        """Run a command as users do; return its output."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleet", *words, "--fleet", port_of(self.running)),
            env=environment(self._runtime) | {"TMPDIR": str(self.running.folder)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()
        return said.decode()

    async def answers(self, more: int, what: str) -> None:
        enough = len(self.talking.heard) + more
        await self.until(lambda: len(self.talking.heard) >= enough or self.talking.failed, what)
        assert self.talking.failed == []

    async def until(self, true: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < end_s, f"timed out after {DEADLINE_S:g} s: {what}; {self.watched.now}"
            await asyncio.sleep(LOOK_S)


def environment(runtime: Path) -> dict[str, str]:
    """Environment in which `up` and the commands share one private folder of running fleets."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
    return mine | {"XDG_RUNTIME_DIR": str(runtime)}


def port_of(running: Up) -> str:
    return running.url.rpartition(":")[2]


@contextmanager
def up(runtime: Path, *arguments: str, **environment: str) -> Iterator[Up]:
    with starting("--no-ray", "--port", "0", *arguments, XDG_RUNTIME_DIR=str(runtime), **environment) as running:
        running.wait_for("Ctrl-C ends everything")
        yield running


@asynccontextmanager
async def talked_to(running: Up, runtime: Path, clients: int, thinks_s: float = 0.0) -> AsyncIterator[Rolled]:
    """Run conversations with `clients` clients on a fleet; errors in the block leave none behind."""
    [file] = (runtime / "warmroute").glob(f"{port_of(running)}-*.json")
    noted = json.loads(file.read_bytes())
    watched = Watched()
    watching = asyncio.create_task(watched.look(noted["controller"]))
    try:
        async with Conversations(running.url, clients, thinks_s) as talking:
            rolled = Rolled(running, runtime, talking, watched)
            await rolled.until(lambda: watched.now, "the controller answers")
            yield rolled
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
