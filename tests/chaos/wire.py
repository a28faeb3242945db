"""A bad wire between two network namespaces (root, Linux): packets are lost, arrive late and overtake each other.

The kernel hands each packet to a thread here, which drops it or writes it to the other side after a while.
"""

import fcntl
import heapq
import os
import random
import selectors
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.chaos.nodes import Node, bare_nodes, ip

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES = 65536
MAX_WAITING = 100_000


class Quality(NamedTuple):
    """Quality of the link, applied to each direction."""

    loss: float = 0.0  # the share of packets that never arrive
    delay_s: float = 0.0
    jitter_s: float = 0.0  # up to so much later: packets overtake each other


class Wire:
    def __init__(self, quality: Quality, seed: int = 0) -> None:
        self.quality = quality
        self.carried = self.lost = 0
        self._chance = random.Random(seed)
        self._ends: list[int] = []
        self._waiting: list[tuple[float, int, int, bytes]] = []  # due, number, to, packet
        self._over, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry)

    def plug(self, node: Node) -> None:
        with node.inside():
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH14x", b"wire", IFF_TUN | IFF_NO_PI))
        self._ends.append(end)
        ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "wire")
        ip("-n", node.namespace, "link", "set", "wire", "up")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            os.write(self._wake, b"x")
            self._thread.join()
        for descriptor in (*self._ends, self._over, self._wake):
            os.close(descriptor)

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for end in (*self._ends, self._over):
                selector.register(end, selectors.EVENT_READ)
            while True:
                due_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
                for key, _ in selector.select(due_s):
                    if key.fd == self._over:
                        return
                    self._take(key.fd)
                self._deliver()

    def _take(self, end: int) -> None:
        other = self._ends[1 - self._ends.index(end)]
        while True:
            try:
                packet = os.read(end, PACKET_BYTES)
            except BlockingIOError:
                return
            self.carried += 1
            if self._chance.random() < self.quality.loss or len(self._waiting) > MAX_WAITING:
                self.lost += 1
                continue
            due_s = time.monotonic() + self.quality.delay_s + self._chance.random() * self.quality.jitter_s
            heapq.heappush(self._waiting, (due_s, self.carried, other, packet))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, end, packet = heapq.heappop(self._waiting)
            try:
                os.write(end, packet)
            except BlockingIOError:
                self.lost += 1


@contextmanager
def wire(quality: Quality) -> Iterator[tuple[Node, Node, Wire]]:
    """Two machines, and the wire between them."""
    with bare_nodes(2, subnet="10.78.0") as (far, near):
        line = Wire(quality)
        try:
            for node in (far, near):
                line.plug(node)
            line.start()
            yield far, near, line
        finally:
            line.close()
