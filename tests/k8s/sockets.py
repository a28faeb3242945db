"""Connections of a test's nodes, polled from the kernel while it runs.

It is asked as ss asks it (sock_diag(7)). To read /proc/net/tcp, for which all of a large hash table is walked in small
steps, takes ten times as long: four machines would keep half a processor busy.
"""

import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tests.chaos.nodes import Node

LOOK_S = 0.05
LISTENS = 10
# Of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h:
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
ALL_STATES = 0xFFFF_FFFF
HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
ASK = struct.Struct("=BBxxI48x")  # inet_diag_req_v2: family, protocol, states; no socket in particular
TOLD = struct.Struct("!BBxxHH16s16s")  # inet_diag_msg: family, state; ports and addresses of this end and its peer
MAX_BYTES = 2**16  # of a message; the kernel sends less at once


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
    with node.inside(), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        while not over.wait(LOOK_S):
            for own, own_port, peer, peer_port, state in _table(kernel):
                if state == LISTENS:
                    seen.listening[node.address].add(own_port)
                elif own == node.address:
                    seen.ends.add((own, own_port, peer, peer_port))


def _table(kernel: socket.socket) -> Iterator[tuple[str, int, str, int, int]]:
    """All TCP sockets of the network namespace in which `kernel` was opened, those in TIME_WAIT too."""
    asked = HEADER.pack(HEADER.size + ASK.size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 0, 0)
    for family in (socket.AF_INET, socket.AF_INET6):
        kernel.send(asked + ASK.pack(family, socket.IPPROTO_TCP, ALL_STATES))
        yield from _answer(kernel)


def _answer(kernel: socket.socket) -> Iterator[tuple[str, int, str, int, int]]:
    while True:
        heard = kernel.recv(MAX_BYTES)
        while heard:
            size, kind, *_ = HEADER.unpack_from(heard)
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                error = -int.from_bytes(heard[HEADER.size : HEADER.size + 4], sys.byteorder, signed=True)
                raise OSError(error, "the kernel does not list its sockets")
            family, state, own_port, peer_port, own, peer = TOLD.unpack_from(heard, HEADER.size)
            yield _address(family, own), own_port, _address(family, peer), peer_port, state
            heard = heard[(size + 3) & ~3 :]


def _address(family: int, packed: bytes) -> str:
    """IPv4, also where it is written as IPv6: the last four bytes."""
    return socket.inet_ntoa(packed[:4] if family == socket.AF_INET else packed[12:])
