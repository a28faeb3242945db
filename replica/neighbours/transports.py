"""How payloads get from one replica to the other; headers always go over the connection itself.

A source has an Outlet for each stream, a reader an Inlet for each connection. Here are those of plain TCP, where a
payload follows its header.
"""

from typing import Protocol

from replica.neighbours.connection import Connection, Patience
from replica.neighbours.messages import Block

TCP = "tcp"


class Outlet(Protocol):
    """The source's end."""

    name: str

    def buffer(self, patience: Patience) -> memoryview:
        """Wait for room for one payload, and return it; at most `block_bytes`."""
        ...

    def send(self, header: Block, payload: memoryview, patience: Patience) -> None:
        """Send a block whose payload is in the buffer that was returned last."""
        ...

    def finish(self, patience: Patience) -> None:
        """Wait until the reader has all payloads."""
        ...


class Inlet(Protocol):
    """The reader's end."""

    name: str

    def receive(self, header: Block, patience: Patience) -> memoryview:
        """Return the payload, valid until the next call."""
        ...

    def close(self) -> None: ...


class TcpOutlet:
    name = TCP

    def __init__(self, connection: Connection, staging: memoryview) -> None:
        self._connection = connection
        self._staging = staging

    def buffer(self, patience: Patience) -> memoryview:
        del patience
        return self._staging

    def send(self, header: Block, payload: memoryview, patience: Patience) -> None:
        self._connection.send_frame(header, patience, payload)

    def finish(self, patience: Patience) -> None:
        pass


class TcpInlet:
    name = TCP

    def __init__(self, connection: Connection, staging: memoryview) -> None:
        self._connection = connection
        self._staging = staging

    def receive(self, header: Block, patience: Patience) -> memoryview:
        payload = self._staging[: header.size]
        self._connection.receive_into(payload, patience)
        return payload

    def close(self) -> None:
        pass
