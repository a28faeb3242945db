"""The network of a world: hosts, and connections between them that are byte streams in memory.

What a protocol writes waits in its transport until the peer has room for it, is on its way for a time that the seed
draws, and is read in pieces that it draws, too. Only bytes of one connection arrive in order.

    write -> unsent -> (window) -> on the way -> (delay; stops while a host is silent) -> unread -> data_received
"""

import asyncio
import errno
import logging
import math
import random
import socket
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any
from weakref import WeakSet

from tests.world.loop import WorldLoop

HERE: ContextVar["Host"] = ContextVar("host")  # that the running code belongs to
DELAYS_S = (0.0, 0.0, 0.0001, 0.0001, 0.0002, 0.0005, 0.001, 0.004)  # few values, so that many moments coincide
SLOW_DELAYS_S = (0.005, 0.05, 0.3)  # of some connections
WINDOWS = (2_048, 16_384, 65_536, 262_144)  # bytes under way and unread
MAX_READ = 262_144
HIGH_WATER = 65_536
RESENT_WITHIN_S = 0.4  # after a silence
FIRST_PORT = 40_000  # of those that connect


class Host:
    """A machine: where it listens, and its ends of connections."""

    def __init__(self, network: "Network", name: str, address: str) -> None:
        self.name, self.address = name, address
        self.silent = False  # no packet comes or goes; nothing closes
        self.apart: set[Host] = set()  # no packet passes between them and this one
        self.has_sockets = True  # else it can open no further connection
        self.lacked_socket_s = -math.inf  # when it last did
        self.troubled_s = -math.inf  # when it last spoke again, or a connection of it was lost
        self.listeners: dict[int, Listener] = {}
        self.ends: dict[End, None] = {}
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._network = network
        self._heard = asyncio.Event()

    def silence(self) -> None:
        self.silent = True

    def speak(self) -> None:
        """Let packets pass again; what was lost meanwhile is sent once more."""
        self.silent = False
        self.troubled_s = self._network.loop.time()
        self._is_heard()

    def part(self, other: "Host") -> None:
        """Let no packet pass between these two."""
        self.apart.add(other)
        other.apart.add(self)

    def meet(self, other: "Host") -> None:
        self.apart.discard(other)
        other.apart.discard(self)
        self._is_heard()

    def _is_heard(self) -> None:
        self._heard.set()
        self._heard = asyncio.Event()
        for host in self._network.hosts.values():
            for end in host.ends:
                if self in (host, end.peer.host):
                    end.arrive_soon(RESENT_WITHIN_S)

    def hears(self, other: "Host") -> bool:
        return not (self.silent or other.silent or other in self.apart)

    async def heard(self, by: "Host") -> None:
        while self.silent or by in self.apart:
            await self._heard.wait()

    def kill(self) -> None:
        """End its process: the system closes all of its sockets, and nothing of it runs any more. Nobody is told."""
        self.listeners.clear()
        for end in list(self.ends):
            end.vanish()
        loop: Any = self._network.loop
        for task in self.tasks:
            asyncio.tasks._unregister_task(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._network.dead += self.tasks
        self.tasks.clear()
        for handle in [*loop._scheduled, *loop._ready]:
            if handle._context is not None and handle._context.get(HERE) is self:
                handle.cancel()

    def cut(self, chance: random.Random, error: OSError | None = None) -> int:
        """Reset some of its connections at both ends, as a box between them does; return how many.

        `error`: what the box tells the peers instead, and nobody here.
        """
        self.troubled_s = self._network.loop.time()
        cut = [end for end in self.ends if chance.random() < 0.5]
        for end in cut:
            if error is None:
                end.reset()
                end.peer.reset()
            else:
                end.lose()
                end.peer.fail(error)
        return len(cut)

    def lose_packets(self, resent_after_s: float) -> None:
        """Let what is on its way from it be lost, and be sent again."""
        for end in self.ends:
            end.peer.arrive_later(resent_after_s)

    def lose(self, chance: random.Random, share: float) -> int:
        """Let no packet of this share of connections pass any more, as if a box between had forgotten them."""
        self.troubled_s = self._network.loop.time()
        lost = [end for end in self.ends if chance.random() < share]
        for end in lost:
            end.lose()
            end.peer.lose()
        return len(lost)


class Network:
    def __init__(self, loop: WorldLoop, seed: str, slow_share: float = 0.0) -> None:
        self.loop = loop
        self._slow_share = slow_share  # of the connections
        self.hosts: dict[str, Host] = {}  # by address
        self._seed = seed
        self._connections = 0
        self.dead: list[asyncio.Task[Any]] = []  # tasks of killed processes
        loop.network = self
        loop.set_task_factory(self._task)  # type: ignore[arg-type]

    def _task(self, loop: WorldLoop, work: Any, context: Any = None, **more: Any) -> "asyncio.Task[Any]":
        """Make a task, and note to which host it belongs."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context, **more)
        host = HERE.get(None) if context is None else context.get(HERE)
        if host is not None:
            host.tasks.add(task)
        return task

    def host(self, name: str) -> Host:
        number = len(self.hosts) + 1
        address = f"10.0.{number // 250}.{number % 250}"
        made = self.hosts[address] = Host(self, name, address)
        return made

    def listen(self, factory: Callable[[], Any], address: str, port: int) -> "Listener":
        host = self.hosts[address]
        if port in host.listeners:
            raise OSError(98, f"{address}:{port} is in use")
        listener = host.listeners[port] = Listener(host, port, factory)
        return listener

    async def connect(self, factory: Callable[[], Any], address: str, port: int) -> "tuple[End, Any]":
        here, there = HERE.get(), self.hosts.get(address)
        self._connections += 1
        number = self._connections
        chance, asked_s = random.Random(f"{self._seed} connection {number}"), self.loop.time()
        await asyncio.sleep(chance.choice(DELAYS_S))
        await here.heard(here)
        if not here.has_sockets:
            here.lacked_socket_s = self.loop.time()
            raise OSError(errno.EMFILE, "Too many open files")
        if there is None:
            raise OSError(113, f"no route to {address}")
        await there.heard(here)
        listener = there.listeners.get(port)
        if listener is None:
            await asyncio.sleep(chance.choice(DELAYS_S))
            await here.heard(there)
            raise ConnectionRefusedError(111, "Connection refused")
        ours = End(self.loop, here, random.Random(f"{self._seed} end {number}"), copy_context())
        theirs = End(self.loop, there, random.Random(f"{self._seed} other end {number}"), listener.context)
        ours.window = theirs.window = chance.choice(WINDOWS)
        if chance.random() < self._slow_share:
            ours.delays_s = theirs.delays_s = SLOW_DELAYS_S
            ours.window = theirs.window = max(WINDOWS)  # with a small one, a long body would take minutes
        ours.peer, theirs.peer = theirs, ours
        ours.asked_s = theirs.asked_s = asked_s
        ours.addresses = (here.address, FIRST_PORT + number), (address, port)
        theirs.addresses = ours.addresses[::-1]
        theirs.open(listener.context.run(listener.factory))
        try:
            await asyncio.sleep(chance.choice(DELAYS_S))
            await here.heard(here)
            await there.heard(here)
        except asyncio.CancelledError:
            ours.vanish()
            raise
        if ours.is_closing():
            raise ConnectionResetError(104, "Connection reset by peer")
        protocol = factory()
        ours.open(protocol)
        return ours, protocol

    def bury(self) -> None:
        """Close what killed processes have left, which they would do themselves at some later moment."""
        logging.disable()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for task in self.dead:
                with suppress(RuntimeError):  # it waits for something at its end
                    task.get_coro().close()
        logging.disable(logging.NOTSET)

    def left(self) -> list[str]:
        """Connections and listeners that nobody has closed."""
        ends = [f"the connection {end}" for host in self.hosts.values() for end in host.ends]
        listeners = [f"{host.name} listens at {port}" for host in self.hosts.values() for port in host.listeners]
        return sorted(ends) + sorted(listeners)


class Bound:
    """Stands for a socket that is bound, or connected."""

    family = 2  # AF_INET

    def __init__(
        self,
        address: tuple[str, int],
        peer: tuple[str, int] | None = None,
        keepalive: dict[int, int] | None = None,
        around: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None,
    ) -> None:
        """`around`, if any, is put around what makes the protocols of a listener."""
        self._address, self._peer, self._keepalive, self.around = address, peer, keepalive, around

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def getpeername(self) -> tuple[str, int]:
        if self._peer is None:
            raise OSError(107, "not connected")
        return self._peer

    def setsockopt(self, level: int, name: int, value: int) -> None:
        if level == socket.IPPROTO_TCP and self._keepalive is not None:
            self._keepalive[name] = value

    def close(self) -> None:
        """Close nothing: the transport, or the listener, does."""


class Listener(asyncio.AbstractServer):
    def __init__(self, host: Host, port: int, factory: Callable[[], Any]) -> None:
        self.host, self.port, self.factory = host, port, factory
        self.context = copy_context()
        self.context.run(HERE.set, host)
        self.sockets = [Bound((host.address, port))]

    def close(self) -> None:
        if self.host.listeners.get(self.port) is self:
            del self.host.listeners[self.port]

    def is_serving(self) -> bool:
        return self.host.listeners.get(self.port) is self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def start_serving(self) -> None:
        """It does from the start."""

    async def serve_forever(self) -> None:
        raise NotImplementedError("whoever listens here closes the listener")

    async def wait_closed(self) -> None:
        """It has closed at once."""


_EOF, _RESET = b"", None  # on the way, beside bytes


class End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop: WorldLoop, host: Host, chance: random.Random, context: Any) -> None:
        super().__init__()
        self.host = host
        self.peer: End
        self.window = 0
        self.delays_s: Sequence[float] = DELAYS_S
        self.is_lost = False  # no packet of it passes any more, and nobody is told
        self.keepalive: dict[int, int] = {}
        self.asked_s = 0.0  # when the connection was asked for,
        self.written_s = self.read_s = 0.0  # and when its protocol last wrote to it, or read
        self.addresses: tuple[tuple[str, int], tuple[str, int]]
        self._loop, self._chance, self._context = loop, chance, context
        self._protocol: Any = None
        self._unsent = bytearray()
        self._high, self._low = HIGH_WATER, HIGH_WATER // 4
        self._is_full = False  # the protocol was told to pause
        self._way: deque[tuple[float, bytes | None]] = deque()  # to this end, with the times of arrival
        self._arrives: asyncio.TimerHandle | None = None
        self._ends: asyncio.TimerHandle | None = None
        self._unread = bytearray()
        self._at_eof = False
        self._under_way = 0  # bytes that the peer has sent, and this end has not read
        self._reads: asyncio.Handle | None = None
        self._paused = False
        self._no_more = False  # of ours follows: it ends once all is sent
        self._said_eof = False
        self._closing = False
        self._lost = False

    def __repr__(self) -> str:
        (ours, our_port), (theirs, their_port) = self.addresses
        return f"{self.host.name} {ours}:{our_port} to {self.peer.host.name} {theirs}:{their_port}"

    def open(self, protocol: Any) -> None:
        self._protocol = protocol
        self.host.ends[self] = None
        self._context.run(protocol.connection_made, self)
        self._read_soon()

    # ---- what a protocol asks of its transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        ours, theirs = self.addresses
        return {"socket": Bound(ours, theirs, self.keepalive), "sockname": ours, "peername": theirs}.get(name, default)

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not (self._paused or self._closing)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused and not self._closing:
            self._paused = False
            self._read_soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._no_more or self._closing:
            if not self._closing:
                raise RuntimeError("Cannot call write() after write_eof()")
            return
        self.written_s = self._loop.time()
        self._unsent += data
        self._send()
        if len(self._unsent) > self._high and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    @property
    def has_read_all(self) -> bool:
        """Tell whether all that the peer has sent has been read."""
        return not (self._under_way or self.peer._unsent)

    def write_eof(self) -> None:
        if not (self._no_more or self._closing):
            self._no_more = True
            self._send()

    def close(self) -> None:
        """Send what there is, and then end."""
        if not self._closing:
            self._closing = self._no_more = True
            self._send()

    def abort(self) -> None:
        """End at once; what the system has already is still sent."""
        self.fail(None)

    # ---- what happens to it

    def vanish(self) -> None:
        """Its process is gone, which nobody tells the protocol. The system says it to the peer."""
        if not self._lost:
            self._closing = self._lost = True
            self._leave()
            self._farewell()

    def reset(self) -> None:
        """Both ends learn of a reset, each by itself."""
        self._put(_RESET)

    def lose(self) -> None:
        """Let nothing pass any more. Its system ends it once it has asked for a sign of life in vain."""
        if self.keepalive and not (self._lost or self.is_lost):
            names = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
            idle_s, between_s, times = [self.keepalive[name] for name in names]
            self._ends = self._loop.call_later(idle_s + between_s * times, self._over, TimeoutError(110, "timed out"))
        self.is_lost = True

    def fail(self, error: OSError | None) -> None:
        """End at once, with what its system was told."""
        if not self._lost:
            self._closing = True
            self._unsent.clear()
            if self._protocol is not None:  # else whoever connects finds it closed
                self._over(error)

    def arrive_later(self, by_s: float) -> None:
        self._way = deque((at_s + by_s, part) for at_s, part in self._way)
        if self._arrives is not None:
            self._arrives.cancel()
            self._arrives = self._loop.call_at(self._way[0][0], self._arrive, context=self._context)

    def arrive_soon(self, within_s: float) -> None:
        if self._way and self._arrives is None:
            self._arrives = self._loop.call_later(within_s * self._chance.random(), self._arrive, context=self._context)

    # ---- ours, on the way

    def _send(self) -> None:
        """Give the network as much as the peer has room for."""
        peer = self.peer
        while self._unsent and (room := self.window - peer._under_way) > 0:
            size = min(room, len(self._unsent))
            if size > 1 and self._chance.random() < 0.05:  # a part of it only
                size = self._chance.randrange(1, size)
            part = bytes(self._unsent[:size])
            del self._unsent[:size]
            peer._under_way += size
            peer._put(part)
        if self._is_full and len(self._unsent) <= self._low:
            self._is_full = False
            self._loop.call_soon(self._ready, context=self._context)
        if self._unsent or not self._no_more:
            return
        if self._closing:
            if not self._lost:
                self._over(None)
        elif not self._said_eof:
            self._said_eof = True
            peer._put(_EOF)

    def _ready(self) -> None:
        if not self._is_full and not self._lost:
            self._protocol.resume_writing()

    def _over(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._leave()
            self._farewell()
            self._loop.call_soon(self._tell_lost, error, context=self._context)

    def _tell_lost(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        protocol.connection_lost(error)

    def _leave(self) -> None:
        self.host.ends.pop(self, None)
        for handle in (self._arrives, self._reads, self._ends):
            if handle is not None:
                handle.cancel()
        self._arrives = self._reads = self._ends = None

    def _farewell(self) -> None:
        """As a system closes a socket: what was never read, or is still on the way, makes it a reset."""
        if not self.peer._lost:
            is_read = not self._unread and not any(part for _, part in self._way)
            self.peer._put(_EOF if is_read else _RESET)

    # ---- the peer's, on the way

    def _put(self, part: bytes | None) -> None:
        if self._lost:
            if part:
                self.peer._put(_RESET)  # nobody is here any more
            return
        now_s = self._loop.time()
        at_s = now_s + self._chance.choice(self.delays_s)
        if self._way:
            at_s = max(at_s, self._way[-1][0])
        self._way.append((at_s, part))
        if self._arrives is None:
            self._arrives = self._loop.call_at(at_s, self._arrive, context=self._context)

    def _arrive(self) -> None:
        self._arrives = None
        if self.is_lost or not self.host.hears(self.peer.host):
            return  # `speak` has it sent again
        now_s = self._loop.time()
        while self._way and self._way[0][0] <= now_s:
            part = self._way.popleft()[1]
            if part is _RESET:
                self._way.clear()
                self._closing = True
                self._unsent.clear()
                self._unread.clear()
                if self._protocol is not None:
                    self._over(ConnectionResetError(104, "Connection reset by peer"))
                return
            if part:
                self._unread += part
            else:
                self._at_eof = True
        if self._way:
            self._arrives = self._loop.call_at(self._way[0][0], self._arrive, context=self._context)
        self._read()

    def _read_soon(self) -> None:
        if self._reads is None and (self._unread or self._at_eof):
            self._reads = self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._reads = None
        if self._paused or self._closing or self._protocol is None:
            return
        if self._unread:
            size = min(len(self._unread), MAX_READ)
            if size > 1 and self._chance.random() < 0.1:
                size = self._chance.randrange(1, size)
            data = bytes(self._unread[:size])
            del self._unread[:size]
            self._under_way -= size
            self.read_s = self._loop.time()
            self._call(self._protocol.data_received, data)
            if not self.peer._lost:
                self.peer._send()
            self._read_soon()
        elif self._at_eof:
            self._at_eof = False
            if not self._call(self._protocol.eof_received):
                self.close()

    def _call(self, callback: Callable[..., Any], *arguments: Any) -> Any:
        """As asyncio does: what a protocol raises ends its connection."""
        try:
            return callback(*arguments)
        except Exception as error:  # asyncio, too, hands a protocol's error to the loop
            context = {"message": "a protocol's own mistake", "exception": error, "transport": self}
            self._loop.call_exception_handler(context)
            self.abort()
            return True
