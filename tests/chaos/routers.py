"""Whole routers as users run them, with fleets of simulated replicas behind them that can be killed and come back."""

import atexit
import json
import os
import random
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache
from http.client import RemoteDisconnected
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx2

from router.config import RouterConfig
from router.members.spec import ReplicaSpec
from router.process.front import Front
from tests.chaos.replicas import Command, can_bind, command, until, wait_gone
from tests.events.processes import DEADLINE_S, wait_until
from tests.processes import children
from tests.replica.serving import Replica
from tests.router.scripted import close_at_once

OWN_PORTS = 500  # of a test process
PORTS = 5  # of a replica: HTTP, events, replay, status, snapshot
# Parts of an answer that differ between identical requests.
CHANCE = re.compile(rb'"id":"[^"]*"|"created":\d+|"cached_tokens":\d+')


class RouterProcess(Replica):
    """`warmroute router` on a port of its own choice, or of ours; one process, unless the options say otherwise."""

    def __init__(self, *options: object, port: int = 0) -> None:
        workers = () if "--workers" in options else ("--workers", "1")
        words = ["router", "--port", str(port), *workers, *map(str, options)]
        self._start([sys.executable, "-m", "fleet", *words])

    def is_ready(self) -> bool:
        try:
            return self.get("/ready").status == 200
        except RemoteDisconnected:  # it had accepted, and closes what has not asked yet
            return False

    def status_of(self, name: str) -> Any:
        [found] = [one for one in self.get("/replicas").json["replicas"] if one["name"] == name]
        return found

    def decisions(self, limit: int = 1000) -> list[Any]:
        """Decisions, the newest first."""
        found: list[Any] = self.get(f"/decisions?limit={limit}").json["decisions"]
        return found


@contextmanager
def router(
    *options: object, ready: bool = True, port: int = 0, within_s: float = DEADLINE_S
) -> Iterator[RouterProcess]:
    running = RouterProcess(*options, port=port)
    try:
        running.wait_ready(within_s)
        if ready:
            wait_until(running.is_ready, "the router is ready", within_s)
        yield running
    finally:
        running.process.kill()
        running.end(None)


class Fleet:
    """Replicas named r0, r1, ... on ports that they keep when restarted."""

    def __init__(self, stack: ExitStack, count: int, options: tuple[object, ...], host: str) -> None:
        self._stack = stack
        self._host = host
        self._options = options
        self.first_port = steady_ports(PORTS * count)
        self.replicas = [self._begun(number) for number in range(count)]
        for replica in self.replicas:
            replica.wait_ready()

    def __getitem__(self, number: int) -> Command:
        return self.replicas[number]

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self.replicas]

    @property
    def specs(self) -> list[ReplicaSpec]:
        return [ReplicaSpec(name=f"r{number}", url=url) for number, url in enumerate(self.urls)]

    @property
    def as_options(self) -> list[str]:
        return [text for spec in self.specs for text in ("--replica", f"url={spec.url},name={spec.name}")]

    def start(self, number: int, *, ready: bool = True) -> None:
        """Start a replica in place of one that has ended."""
        assert self.replicas[number].process.poll() is not None, f"r{number} is still running"
        replica = self.replicas[number] = self._begun(number)
        if ready:
            replica.wait_ready()

    def signal(self, number: int, sign: int, *, http: bool = True, engine: bool = True) -> None:
        """Send a signal to one of the replica's two processes, or to both."""
        pids = [self[number].process.pid] * http + children(self[number].process.pid) * engine
        for pid in pids:
            os.kill(pid, sign)

    def kill(self, number: int) -> None:
        engine = children(self[number].process.pid)
        self[number].signal(signal.SIGKILL)
        self[number].process.wait(DEADLINE_S)
        wait_gone(*engine)

    def _begun(self, number: int) -> Command:
        port = self.first_port + PORTS * number
        options = (*self._options, "--replica-name", f"r{number}", "--log-level", "warning")
        where = {"host": self._host, "port": port, "events_port": port + 1}
        return self._stack.enter_context(command(*options, **where, ready=False))


def steady_ports(count: int) -> int:
    """Neighbouring free ports that no outgoing connection takes while their owner is away, which many clients make.

    Who gets them need not bind them at once: they are not given again before all others were.
    """
    own = _own_ports()
    while True:
        first = next(own)
        rest = (next(own) for _ in range(count - 1))
        if all(port == first + number and can_bind(port) for number, port in enumerate((first, *rest))):
            return first


@cache
def _own_ports() -> Iterator[int]:
    """Ports that no other test process takes; a socket at the one before them says so, as long as this one lives."""
    first_taken = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = first_taken * 5 // 8  # above those of Ray's workers, where these are the usual ones
    places = list(range(first, first_taken - OWN_PORTS, OWN_PORTS))
    for place in random.sample(places, len(places)):
        guard = socket.socket()
        try:
            guard.bind(("127.0.0.1", place))
        except OSError:
            guard.close()
            continue
        atexit.register(guard.close)
        return cycle(range(place + 1, place + OWN_PORTS))
    raise AssertionError(f"every one of {len(places)} ranges of ports is another test process's")


@contextmanager
def fleet(count: int, *options: object, host: str = "127.0.0.1") -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, count, options, host)


@asynccontextmanager
async def front(specs: list[ReplicaSpec], **config: Any) -> AsyncIterator[Front]:
    """A router in this process, so that its index can be looked into."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = Front(RouterConfig(replicas=tuple(specs), **config), listener)
        await running.start()
        try:
            members = running.router.members
            up: Callable[[], bool] = lambda: all(  # noqa: E731
                spec.name in members.by_name and members.by_name[spec.name].candidate.unavailable is None
                for spec in specs
            )
            await until(up, "every replica takes requests")
            yield running
        finally:
            await close_at_once(running)


def port_of(running: Front) -> int:
    port: int = running.listener.getsockname()[1]
    return port


@asynccontextmanager
async def http_client(url: str, timeout_s: float = DEADLINE_S) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as made:
        yield made


def without_chance(body: bytes) -> bytes:
    return CHANCE.sub(b"", body)


def events_in(body: bytes) -> list[Any]:
    """Events of a stream that ends with [DONE]."""
    assert body.endswith(b"data: [DONE]\n\n"), body[-300:]
    return [json.loads(line[6:]) for line in body.split(b"\n\n")[:-2]]
