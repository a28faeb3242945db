"""Messages of very many, very large or endless parts, sent to every socket that a router or a replica opens.

libzmq collects the parts of a message before its user sees one, and bounds neither their number nor their sum.
"""

import asyncio
import ctypes
import re
import socket as network
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

import events
from events.publisher import Publisher, PublisherConfig
from events.sockets.curve import CurveClient, load_curve, secure_server, write_keys
from events.source import Source
from events.subscriber import Subscriber
from router.placement.placement import Placement
from router.workers.peer_links import Links
from tests.hostile.pauses import pauses
from tests.hostile.peers import GREETING, connected, part, ready, resident_mb

ANY = "tcp://127.0.0.1:0"
MAX_MB = 90.0  # that an attack may cost: a message of 32 MiB from another router, and copies of its last part
MAX_PAUSE_S = 0.1
DEADLINE_S = 20.0

# What is sent again and again, and how often.
FLOODS = {
    "large parts": (part(bytes(7 * 2**20), True), 60),
    "tiny parts": (part(b"", True) * 100_000, 80),
    "parts without an end": (part(b"x" * 1000, True) * 1000, 300),
}
TO_A_PUBLISHER = FLOODS | {"large parts": (part(bytes(1024), True) * 1000, 300)}  # it takes no larger ones


class Attacker:
    """Listens as a publisher that floods whoever connects."""

    def __init__(self, kind: bytes, flood: tuple[bytes, int] | None) -> None:
        self._listener = network.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.over = threading.Event()  # it has sent all, or was cut off
        self.was_cut_off = False
        self._kind = kind
        self._flood = flood
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            opened = self._listener.accept()[0]
            with opened:
                if self.over.is_set():
                    return
                opened.settimeout(DEADLINE_S)
                try:
                    opened.sendall(GREETING + ready(self._kind))
                    received = b""
                    while b"READY" not in received:
                        received += opened.recv(4096)
                    if self._flood is not None:
                        _send(opened, *self._flood)
                        self.over.set()
                    while opened.recv(4096):
                        pass
                except TimeoutError:
                    self.over.set()
                except OSError:
                    self.was_cut_off = True
                    self.over.set()

    def close(self) -> None:
        self.over.set()
        with network.create_connection(self._listener.getsockname()):
            pass
        self._thread.join()
        self._listener.close()


def _send(opened: network.socket, piece: bytes, times: int) -> None:
    for _ in range(times):
        opened.sendall(piece)


@asynccontextmanager
async def attacker(kind: bytes, flood: tuple[bytes, int] | None = None) -> AsyncIterator[Attacker]:
    made = Attacker(kind, flood)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def withstands(is_over: Callable[[], bool]) -> None:
    ctypes.CDLL(None).malloc_trim(0)  # what others have left would be used first
    before_mb = most_mb = resident_mb()
    async with pauses() as found:
        deadline = time.monotonic() + DEADLINE_S
        while not is_over():
            most_mb = max(most_mb, resident_mb())
            assert most_mb - before_mb < MAX_MB, f"it takes {most_mb - before_mb:.0f} MB"
            assert time.monotonic() < deadline, "it is not cut off"
            await asyncio.sleep(0.002)
    assert found.longest_s < MAX_PAUSE_S, f"the event loop stands still for {found.longest_s:.2f} s"


# ---- sockets that connect: of the subscriber, and of a router to its peers


@asynccontextmanager
async def following(endpoint: str, name: str, honest: str) -> AsyncIterator[None]:
    """Follow a replica of which one socket, by this name, is the attacker's."""
    source = Source("attacked", honest)
    if name != "replay":
        source = replace(source, status=honest, snapshot="tcp://127.0.0.1:1")
    async with Subscriber() as subscriber:
        subscriber.add(replace(source, **{name: endpoint}))
        yield


@asynccontextmanager
async def hearing(endpoint: str) -> AsyncIterator[None]:
    links = Links(Placement("cost", optimistic_ttl_s=1.0, first_token_timeout_s=1.0), lambda _: None, print, ANY)
    try:
        links._connect(frozenset({endpoint}))
        yield
    finally:
        links.close()


@asynccontextmanager
async def unbounded(endpoint: str) -> AsyncIterator[None]:
    """A socket as pyzmq gives it, with the only bound that libzmq has: of one part."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger, socket.maxmsgsize = 0, 8 * 2**20
        socket.subscribe(b"")
        socket.connect(endpoint)

        async def read() -> None:
            while True:
                while socket.poll(0):
                    socket.recv_multipart()
                await asyncio.sleep(0.002)

        reading = asyncio.create_task(read())
        yield
        reading.cancel()


CONNECTING = {"events": b"PUB", "status": b"PUB", "replay": b"ROUTER", "snapshot": b"ROUTER", "peers": b"PUB"}


def attached(name: str, endpoint: str, honest: str) -> AbstractAsyncContextManager[None]:
    return hearing(endpoint) if name == "peers" else following(endpoint, name, honest)


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("name", CONNECTING)
async def test_a_publisher_that_sends_too_much_in_one_message_is_cut_off(name: str, flood: str) -> None:
    async with (
        attacker(CONNECTING[name], FLOODS[flood]) as hostile,
        attacker(b"PUB") as honest,
        attached(name, hostile.endpoint, honest.endpoint),
    ):
        await withstands(hostile.over.is_set)
    assert hostile.was_cut_off


@pytest.mark.parametrize("flood", FLOODS)
async def test_the_attack_finds_a_socket_without_the_bound(flood: str) -> None:
    async with attacker(b"PUB", FLOODS[flood]) as hostile, unbounded(hostile.endpoint):
        with pytest.raises(AssertionError, match=r"it takes|stands still"):
            await withstands(hostile.over.is_set)


async def test_a_publisher_with_keys_is_cut_off_as_well(tmp_path: Path) -> None:
    keys = load_curve(str(write_keys(str(tmp_path / "key"))[1]))
    big = zmq.Frame(bytes(7 * 2**20))
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.linger = 0
        secure_server(socket, keys)
        socket.bind(ANY)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        async with Subscriber() as subscriber:
            curve = CurveClient(keys.public, keys.public, keys.secret)
            view = subscriber.add(Source("attacked", endpoint, curve=curve))
            while not view.stream.stats.batches:
                socket.send_multipart([b"", bytes(8), b"\x93\x00\x90\x00"])
                await asyncio.sleep(0.002)
            monitor.recv_multipart()
            for _ in range(40):
                socket.send(big, zmq.SNDMORE, copy=False)
            socket.send(b"")
            before_mb = resident_mb()  # what waits in the publisher is shared
            deadline = time.monotonic() + DEADLINE_S
            while not monitor.poll(0):
                assert resident_mb() - before_mb < 3 * MAX_MB, "encrypted copies wait on both sides"
                assert time.monotonic() < deadline, "it is not cut off"
                await asyncio.sleep(0.002)
        socket.disable_monitor()
        monitor.close()


# ---- sockets that are bound: of a publisher, and of a router for its peers


@pytest.mark.parametrize("flood", TO_A_PUBLISHER)
@pytest.mark.parametrize("name", ["events", "status", "replay", "snapshot", "peers"])
async def test_a_peer_that_sends_too_much_in_one_message_is_cut_off(
    name: str, flood: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        if name == "peers":
            placement = Placement("cost", optimistic_ttl_s=1.0, first_token_timeout_s=1.0)
            links = Links(placement, lambda _: None, print, ANY)
            stack.callback(links.close)
            endpoint = links.endpoint
        else:
            publisher = stack.enter_context(Publisher(PublisherConfig(ANY, ANY, ANY, ANY)))
            endpoint = getattr(publisher.endpoints, name)
        with flooding(endpoint, b"DEALER" if name in ("replay", "snapshot") else b"SUB", *TO_A_PUBLISHER[flood]):
            await withstands(lambda: "sends without end; closing it" in caplog.text)


@contextmanager
def flooding(endpoint: str, kind: bytes, piece: bytes, times: int) -> Iterator[None]:
    """Send a flood from a thread; what is shut down may just not be read any more."""

    def flood() -> None:
        with suppress(OSError):
            _send(opened, piece, times)

    with connected(endpoint, kind) as opened:
        opened.settimeout(1.0)
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):  # it is cut off already
                opened.shutdown(network.SHUT_RDWR)
            thread.join()


# ---- no others


def test_no_other_socket_is_opened() -> None:
    """List the places that open a socket: another one has to bound what comes by it, and to be attacked above."""
    root = Path(events.__file__).parent.parent
    makers = {
        "libzmq": r"\.socket\(\s*(zmq\.|kind|self\._kind)",
        "bound": r"BoundSocket\(",
        "link": r"(Plain|Curve)Link\b",
    }
    found = {
        name: {
            str(path.relative_to(root))
            for folder in ("api", "engines", "events", "router", "replica", "fleet")
            for path in (root / folder).rglob("*.py")
            if re.search(pattern, path.read_text())
            and not re.search(rf"^class {pattern}", path.read_text(), re.MULTILINE)
        }
        for name, pattern in makers.items()
    }
    assert found == {
        "libzmq": {
            "events/sockets/peers.py",
            "events/sockets/curve_link.py",
            "events/tool/replay.py",  # it sends recordings
            "replica/http/engine_client.py",  # to the engine's process that it has started, in a folder of its own
            "replica/process.py",
        },
        "bound": {"events/publisher.py", "router/workers/peer_links.py"},
        "link": {"events/subscriber.py", "router/workers/peer_links.py"},
    }
