"""A router, its replicas and its clients in virtual time: what takes a minute takes none, and nothing is ever late.

They run on the loop and the network of tests/world. Tests that need a thread, a process or the kernel's sockets do not.
"""

import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.world.loop import WorldLoop, run
from tests.world.network import HERE, Host, Listener, Network

ADDRESS = "127.0.0.1"
FIRST_PORT = 50_000  # of those that listen at any port
T = TypeVar("T")


class Loopback(Network):
    """One host for all."""

    def __init__(self, loop: WorldLoop, seed: str) -> None:
        super().__init__(loop, seed)
        self._host = self.hosts[ADDRESS] = Host(self, "here", ADDRESS)
        self._ports = iter(range(FIRST_PORT, 2**16))

    def listen(self, factory: Callable[[], Any], address: str, port: int) -> Listener:
        return super().listen(factory, address, port or next(self._ports))

    async def connect(self, factory: Callable[[], Any], address: str, port: int) -> Any:
        HERE.set(self._host)
        return await super().connect(factory, address, port)


def virtual_loop(seed: int = 0) -> WorldLoop:
    loop = WorldLoop(random.Random(seed))
    Loopback(loop, str(seed))
    return loop


def in_virtual_time(scenario: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run a scenario to its end; what it leaves, such as a task, a timer or a connection, is an AssertionError."""
    return run(scenario, virtual_loop(seed))
