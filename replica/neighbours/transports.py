"""Ways for payloads from one replica to the other; headers always go over the connection itself.

A source has an Outlet for each stream, a reader an Inlet for each connection. Here are those of plain TCP, where a
payload follows its header; `replica.neighbours.nixl` has others. Both ends use the first transport that both have.
"""

from typing import Protocol

from replica.neighbours.connection import Connection, Patience
from replica.neighbours.messages import Block

TCP = "tcp"


class Outlet(Protocol):
    """The source's end of a stream."""

    def buffer(self, patience: Patience) -> memoryview:
        """Wait for room for one payload of `block_bytes`, and return it."""

    def send(self, header: Block, patience: Patience) -> None:
        """Send a block whose payload is in the buffer that was returned last."""

    def finish(self, patience: Patience) -> None:
        """Wait until the reader has all payloads."""


class Inlet(Protocol):
    """The reader's end of a connection."""

    name: str

    def receive(self, header: Block, patience: Patience) -> memoryview:
        """Return the payload, valid until the next call."""

    def close(self) -> None: ...


class SourceTransport(Protocol):
    """Makes outlets; each of its streams, counted from 0, has buffers of its own."""

    greeting: bytes  # the secret for the reader's end; a listener must not know it

    def outlet(self, connection: Connection, stream: int) -> Outlet: ...


class ReaderTransport(Protocol):
    def inlet(self, connection: Connection, greeting: bytes) -> Inlet | None:
        """Return the end of this connection; None, and why in the log, if it cannot be had."""

    def close(self) -> None: ...


# ---- plain TCP


class TcpSource:
    greeting = b""

    def __init__(self, streams: int, block_bytes: int) -> None:
        self._buffers = [memoryview(bytearray(block_bytes)) for _ in range(streams)]

    def outlet(self, connection: Connection, stream: int) -> Outlet:
        return TcpOutlet(connection, self._buffers[stream])


class TcpOutlet:
    def __init__(self, connection: Connection, buffer: memoryview) -> None:
        self._connection = connection
        self._buffer = buffer

    def buffer(self, patience: Patience) -> memoryview:
        del patience  # its content has been sent
        return self._buffer

    def send(self, header: Block, patience: Patience) -> None:
        self._connection.send_frame(header, patience, self._buffer)

    def finish(self, patience: Patience) -> None:
        pass


class TcpReader:
    def __init__(self, block_bytes: int) -> None:
        self._buffer = memoryview(bytearray(block_bytes))

    def inlet(self, connection: Connection, greeting: bytes) -> Inlet:
        del greeting
        return TcpInlet(connection, self._buffer)

    def close(self) -> None:
        pass


class TcpInlet:
    name = TCP

    def __init__(self, connection: Connection, buffer: memoryview) -> None:
        self._connection = connection
        self._buffer = buffer

    def receive(self, header: Block, patience: Patience) -> memoryview:
        payload = self._buffer[: header.size]
        self._connection.receive_into(payload, patience)
        return payload

    def close(self) -> None:
        pass
