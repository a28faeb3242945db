"""A router, its replicas and its clients in virtual time: what takes a minute takes none, and nothing is ever late."""

import random
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, TypeVar

from tests.world.loop import WorldLoop, run
from tests.world.network import HERE, Host, Listener, Network

ADDRESS = "127.0.0.1"
FIRST_PORT = 50_000  # of those that listen at any port
T = TypeVar("T")


class Loopback(Network):
    """The one host that there is."""

    def listen(self, factory: Callable[[], Any], address: str, port: int) -> Listener:
        return super().listen(factory, address, port or FIRST_PORT + len(self.hosts[address].listeners))


def in_virtual_time(scenario: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run a scenario to its end; what it leaves, such as a task, a timer or a connection, is an AssertionError."""
    loop = WorldLoop(random.Random(seed))
    network = Loopback(loop, str(seed))
    here = network.hosts[ADDRESS] = Host(network, "here", ADDRESS)
    context = copy_context()
    context.run(HERE.set, here)
    return context.run(run, scenario, loop)
