"""Connections of a test's nodes, polled from the kernel's tables while it runs."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.chaos.nodes import Node

LOOK_S = 0.05
LISTENS = 0x0A


class Connection(NamedTuple):
    source: str  # address of the client
    target: str
    port: int  # of the target


class Seen:
    """Ends of connections, and listening ports, by the address of the machine."""

    def __init__(self) -> None:
        self.ends: set[tuple[str, int, str, int]] = set()  # own address and port, the peer's
        self.listening: dict[str, set[int]] = {}

    def connections(self) -> set[Connection]:
        """Connections between machines; the side that listened on its port is the target."""
        found = set()
        for own, own_port, peer, peer_port in self.ends:
            if own != peer and peer in self.listening:
                to_peer = peer_port in self.listening[peer]
                found.add(Connection(own, peer, peer_port) if to_peer else Connection(peer, own, own_port))
        return found


@contextmanager
def watched(nodes: Sequence[Node]) -> Iterator[Seen]:
    """Watch the sockets of all nodes until the block ends."""
    seen, over = Seen(), threading.Event()
    threads = [threading.Thread(target=_watch, args=(node, seen, over)) for node in nodes]
    for node in nodes:
        seen.listening[node.address] = set()
    try:
        for thread in threads:
            thread.start()
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _watch(node: Node, seen: Seen, over: threading.Event) -> None:
    with node.inside():
        while not over.wait(LOOK_S):
            for own, own_port, peer, peer_port, state in _table():
                if state == LISTENS:
                    seen.listening[node.address].add(own_port)
                elif own == node.address:
                    seen.ends.add((own, own_port, peer, peer_port))


def _table() -> Iterator[tuple[str, int, str, int, int]]:
    """Socket table of this thread's network namespace."""
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/thread-self/net", name).read_text().splitlines()[1:]:
            _, own, peer, state, *_ = line.split()
            yield *_place(own), *_place(peer), int(state, 16)


def _place(text: str) -> tuple[str, int]:
    """IPv4, also where it is written as IPv6: the last four bytes, the first one last."""
    address, _, port = text.partition(":")
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(address[-8:]))), int(port, 16)
