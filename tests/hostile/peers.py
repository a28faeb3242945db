"""Peers of event sockets that no library would be: silent ones, and ones that write frames by hand."""

import socket as network
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready(kind: bytes) -> bytes:
    """The handshake's only command, as ZMTP 3.0 writes it."""
    metadata = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    command = b"\x05READY" + metadata
    return b"\x04" + bytes([len(command)]) + command


def part(body: bytes, more: bool) -> bytes:
    if len(body) > 255:
        return bytes([2 | more]) + len(body).to_bytes(8, "big") + body
    return bytes([more, len(body)]) + body


def port_of(endpoint: str | None) -> int:
    assert endpoint is not None
    return int(endpoint.rpartition(":")[2])


def connected(endpoint: str | None, kind: bytes) -> network.socket:
    """A peer after its handshake, which reads nothing any more."""
    with ExitStack() as stack:
        opened = stack.enter_context(network.create_connection(("127.0.0.1", port_of(endpoint)), 10))
        opened.sendall(GREETING + ready(kind))
        received = b""
        while len(received) < len(GREETING) + 10:
            piece = opened.recv(4096)
            if not piece:
                raise ConnectionError("it closed")
            received += piece
        stack.pop_all()
        return opened


@contextmanager
def flooding(endpoint: str | None, kind: bytes, flood: bytes, peers: int = 1) -> Iterator[None]:
    """Peers that send these bytes again and again, and connect again when they are cut off."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            try:
                with connected(endpoint, kind) as opened:
                    opened.settimeout(0.5)  # what is shut down may just stop reading
                    while not stop.is_set():
                        opened.sendall(flood)
            except OSError:
                stop.wait(0.01)

    threads = [threading.Thread(target=go_on) for _ in range(peers)]
    with ExitStack() as stack:
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(stop.set)
        yield


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
