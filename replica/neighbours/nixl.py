"""Payloads by NIXL (the extra `nixl`): the source fills registered buffers, and the reader's end reads them.

The source registers nothing but these buffers: its KV memory is not open to anybody. It sends the header of a block as
soon as its payload is in a buffer, and fills the buffer again once the reader has it. NIXL has no authentication of its
own, so what the reader needs for access travels hidden. A source that reuses a buffer too early, because its reader was
too slow, is found out by the checksum.
"""

import logging
import secrets
import struct
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from replica.neighbours.connection import Connection, Patience
from replica.neighbours.messages import MAX_ANSWER_BYTES, Block, Lost, Taken, decode_from_reader
from replica.neighbours.transports import Inlet, Outlet

log = logging.getLogger(__name__)

NIXL = "nixl"
BUFFERS = 4  # a stream's buffers: one is filled while others are read
MAX_ABANDONED = 4  # transfers that did not end; their buffers are never used again
SPINS = 200  # looks at a transfer before the first pause
PAUSE_S = 0.0002

_ADDRESS = struct.Struct("<Q")


class NotInstalled(Exception):
    """This Python has no NIXL, or one that does not start."""


class _Agent:
    """A NIXL agent with `count` registered buffers. Raise NotInstalled without NIXL."""

    def __init__(self, count: int, block_bytes: int) -> None:
        try:
            # The package for CUDA 12 reads host memory on any machine, and needs no GPU.
            from nixl_cu12 import _bindings as bindings
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except (ImportError, OSError) as error:
            raise NotInstalled(f"NIXL cannot be loaded: {error}; pip install 'warmroute[nixl]'") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        # Its errors have no class in common.
        self.errors = tuple(kind for name, kind in vars(bindings).items() if name.endswith("Error"))
        self._memory = np.zeros((count, block_bytes), np.uint8)
        try:
            self.agent: Any = nixl_agent(f"warmroute-{secrets.token_hex(8)}", nixl_agent_config(backends=["UCX"]))
            self.agent.register_memory([(self._memory.ctypes.data, self._memory.nbytes, 0, "")], "DRAM")
            self.greeting: bytes = self.agent.get_agent_metadata()
        except (*self.errors, RuntimeError) as error:
            raise NotInstalled(f"NIXL does not start: {error}") from error
        self.buffers = [row.data for row in self._memory]
        self.addresses = [row.ctypes.data for row in self._memory]
        self.block_bytes = block_bytes

    def descriptors(self, address: int) -> Any:
        return self.agent.get_xfer_descs([(address, self.block_bytes, 0)], "DRAM")


# ---- the source


class NixlSource:
    def __init__(self, streams: int, block_bytes: int) -> None:
        self._agent = _Agent(streams * BUFFERS, block_bytes)
        self.greeting = self._agent.greeting

    def outlet(self, connection: Connection, stream: int) -> Outlet:
        return NixlOutlet(connection, self._agent, stream * BUFFERS)


class NixlOutlet:
    """Fills its buffers in turn; the reader takes them in the same order."""

    def __init__(self, connection: Connection, agent: _Agent, first: int) -> None:
        self._connection = connection
        self._agent = agent
        self._first = first
        self._sent = 0
        self._untaken: deque[int] = deque()  # indices of blocks

    def buffer(self, patience: Patience) -> memoryview:
        while len(self._untaken) >= BUFFERS:
            self._wait_for_one(patience)
        return self._agent.buffers[self._next]

    @property
    def _next(self) -> int:
        return self._first + self._sent % BUFFERS

    def send(self, header: Block, patience: Patience) -> None:
        at = _ADDRESS.pack(self._agent.addresses[self._next])
        self._connection.send_frame(msgspec.structs.replace(header, at=at), patience)
        self._sent += 1
        self._untaken.append(header.index)

    def finish(self, patience: Patience) -> None:
        while self._untaken:
            self._wait_for_one(patience)

    def _wait_for_one(self, patience: Patience) -> None:
        body = self._connection.receive_frame(MAX_ANSWER_BYTES, patience)
        try:
            taken = decode_from_reader(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Lost("protocol", f"a message cannot be read: {error}") from error
        due = self._untaken.popleft()
        if not isinstance(taken, Taken) or taken.index != due:
            raise Lost("protocol", f"{taken} came, and block {due} was to be taken")


# ---- the reader


class NixlReader:
    """Reads into one registered buffer. After a transfer that did not end it goes on with another agent."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._agent = _Agent(1, block_bytes)
        self._abandoned: list[_Agent] = []

    def inlet(self, connection: Connection, greeting: bytes) -> Inlet | None:
        if len(self._abandoned) > MAX_ABANDONED:
            return None
        try:
            peer = self._agent.agent.add_remote_agent(greeting)
        except self._agent.errors as error:
            log.warning("NIXL does not reach a neighbour, whose blocks come by TCP: %s", error)
            return None
        return NixlInlet(connection, self, self._agent, peer)

    def is_current(self, agent: _Agent) -> bool:
        return agent is self._agent

    def abandon(self, agent: _Agent) -> None:
        """Keep the buffer of a transfer that may still write to it, and never use it again."""
        assert self.is_current(agent), "it was used after it was abandoned"
        self._abandoned.append(agent)
        if len(self._abandoned) > MAX_ABANDONED:
            log.warning("%d transfers by NIXL did not end; blocks come by TCP from now on", len(self._abandoned))
        else:
            self._agent = _Agent(1, self._block_bytes)

    def close(self) -> None:
        pass


class NixlInlet:
    name = NIXL

    def __init__(self, connection: Connection, owner: NixlReader, agent: _Agent, peer: Any) -> None:
        self._connection = connection
        self._owner = owner
        self._agent = agent
        self._peer = peer

    def receive(self, header: Block, patience: Patience) -> memoryview:
        if len(header.at) != _ADDRESS.size:
            raise Lost("protocol", f"block {header.index} has no address")
        if not self._owner.is_current(self._agent):
            raise Lost("nixl", "its buffer was abandoned")
        (address,) = _ADDRESS.unpack(header.at)
        agent, own = self._agent.agent, self._agent.descriptors(self._agent.addresses[0])
        try:
            handle = agent.initialize_xfer("READ", own, self._agent.descriptors(address), self._peer)
        except self._agent.errors as error:
            raise Lost("nixl", f"block {header.index} cannot be read: {error}") from error
        try:
            self._wait(agent.transfer(handle), handle, patience)
            agent.release_xfer_handle(handle)
        except (*self._agent.errors, Lost) as error:
            self._owner.abandon(self._agent)
            raise Lost(getattr(error, "reason", "nixl"), f"block {header.index} was not read: {error}") from error
        self._connection.send_frame(Taken(header.index), patience)
        return self._agent.buffers[0]

    def _wait(self, state: str, handle: Any, patience: Patience) -> None:
        began_s, looks = time.monotonic(), 0
        while state == "PROC":
            looks += 1
            if looks > SPINS:
                patience.check(began_s)
                time.sleep(PAUSE_S)
            state = self._agent.agent.check_xfer_state(handle)
        if state != "DONE":
            raise Lost("nixl", f"the transfer ended as {state}")

    def close(self) -> None:
        try:
            self._agent.agent.remove_remote_agent(self._peer)
        except self._agent.errors as error:
            log.debug("NIXL: %s", error)
