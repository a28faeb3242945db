"""Connections to a replica, against servers with a test's exact bytes."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from router.members.broken import Broken
from router.members.spec import Target
from router.members.upstream import IDLE_LIMIT_S, KEEPALIVE, MAX_HEAD_BYTES, SURE_IDLE_S, Header, Sending, Upstream
from tests.router.loopback import until
from tests.router.scripted import DEADLINE_S, refused_port

REQUEST = b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
Speak = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The replica's end of one connection."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number  # of this connection, from 0
        self.reader, self.writer = reader, writer

    async def request(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def gone(self) -> None:
        """Returns when the router's end is closed."""
        while await self.reader.read(65536):
            pass


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.body = bytearray()
        self.broken: Broken | None = None
        self.calls: list[str] = []
        self.over = asyncio.Event()
        self.sending: Sending

    def answered(self, status: int, headers: list[Header]) -> None:
        self.calls.append("answered")
        self.status, self.headers = status, headers

    def received(self, body: bytes, complete: bool) -> None:
        self.calls.append("complete" if complete else "received")
        self.body += body
        if complete:
            self.over.set()

    def broke(self, broken: Broken) -> None:
        self.calls.append("broke")
        self.broken = broken
        self.over.set()

    async def end(self) -> "Heard":
        async with asyncio.timeout(DEADLINE_S):
            await self.over.wait()
        assert self.sending.over
        return self


@asynccontextmanager
async def upstream_to(speak: Speak) -> AsyncIterator[Upstream]:
    speaking: set[asyncio.Task[None] | None] = set()
    count = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        task = asyncio.current_task()
        speaking.add(task)
        peer = Peer(count, reader, writer)
        count += 1
        try:
            await speak(peer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            speaking.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    upstream = Upstream(Target("127.0.0.1", server.sockets[0].getsockname()[1], False, ""))
    try:
        yield upstream
    finally:
        upstream.close()
        server.close()
        await until(lambda: not speaking, "all connections are closed")
        assert not upstream.sendings and not upstream.idle


def ask(upstream: Upstream, *, bodiless: bool = False, resend: bool = True) -> Heard:
    heard = Heard()
    heard.sending = upstream.send(REQUEST, heard, bodiless=bodiless, resend=resend)
    return heard


def says(*parts: bytes, then: str = "") -> Speak:
    """The same answer to each request of a connection, which is closed or kept after it."""

    async def speak(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(*parts)
            if then == "close":
                return

    return speak


# ---- answers


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (OK + b"content-length: 2\r\n\r\nok", 200, b"ok"),
        (OK + b"content-length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\n", 304, b""),
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, b"ok"),
        (OK + b"transfer-encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nx-trailer: 1\r\n\r\n", 200, b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK + b"content-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 599 \r\ncontent-length: 2\r\n\r\nok", 599, b"ok"),
    ],
    ids=["length", "empty", "204", "304", "chunked", "trailer", "100", "103", "odd status"],
)
async def test_an_answer_is_read_and_its_connection_used_again(answer: bytes, status: int, body: bytes) -> None:
    connections: set[int] = set()

    async def speak(peer: Peer) -> None:
        connections.add(peer.number)
        await says(answer)(peer)

    async with upstream_to(speak) as upstream:
        for _ in range(3):
            heard = await ask(upstream).end()
            assert (heard.status, bytes(heard.body), heard.broken) == (status, body, None)
            assert b"link" not in dict(heard.headers)
            assert len(upstream.idle) == 1
    assert connections == {0}


async def test_an_answer_is_the_same_wherever_it_is_cut() -> None:
    answer = OK + b"x-a: 1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
    cut = 0

    async def speak(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(answer[:cut])
            await asyncio.sleep(0)
            await peer.say(answer[cut:])

    async with upstream_to(speak) as upstream:
        for cut in range(len(answer)):
            heard = await ask(upstream).end()
            assert bytes(heard.body) == b"abc0123456789abcdef", cut
            assert dict(heard.headers)[b"x-a"] == b"1"
            assert heard.calls.count("answered") == heard.calls.count("complete") == 1


async def test_the_head_is_told_before_the_body_comes() -> None:
    more = asyncio.Event()

    async def speak(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + b"content-length: 2\r\n\r\n")
        await more.wait()
        await peer.say(b"ok")

    async with upstream_to(speak) as upstream:
        heard = ask(upstream)
        await until(lambda: heard.calls == ["answered", "received"], "the head has come")
        more.set()
        assert (await heard.end()).body == b"ok"


@pytest.mark.parametrize("head", [OK, b"HTTP/1.0 200 OK\r\n", OK + b"connection: close\r\n"])
async def test_without_a_length_the_end_of_the_connection_is_the_end_of_the_answer(head: bytes) -> None:
    async with upstream_to(says(head + b"\r\n", b"all ", b"of it", then="close")) as upstream:
        heard = await ask(upstream).end()
        assert (bytes(heard.body), heard.broken) == (b"all of it", None)
        assert len(upstream.idle) == 0


async def test_a_connection_that_still_carries_a_refused_body_is_not_used_again() -> None:
    async with upstream_to(says(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno")) as upstream:
        heard = Heard()
        heard.sending = upstream.send(REQUEST, heard, body=bytes(50_000_000))
        assert (await heard.end()).status == 404
        assert len(upstream.idle) == 0
        assert (await ask(upstream).end()).status == 404
        assert len(upstream.idle) == 1


async def test_a_connection_that_the_replica_does_not_keep_is_not_used_again() -> None:
    async with upstream_to(says(OK + b"connection: close\r\ncontent-length: 2\r\n\r\nok")) as upstream:
        for _ in range(2):
            assert (await ask(upstream).end()).body == b"ok"
            assert len(upstream.idle) == 0


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 5\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n",
        b"connection: close\r\ncontent-length: 5\r\n\r\n",
    ],
)
async def test_the_answer_to_head_ends_with_its_head(head: bytes) -> None:
    async with upstream_to(says(OK + head)) as upstream:
        for _ in range(2):
            heard = await ask(upstream, bodiless=True).end()
            assert (heard.status, bytes(heard.body)) == (200, b"")


@pytest.mark.parametrize(
    "sent",
    [
        OK + b"content-length: 5\r\n\r\nab",
        OK + b"transfer-encoding: chunked\r\n\r\n5\r\nab",
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
        OK + b"connection: close\r\ncontent-length: 5\r\n\r\nab",
        OK + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
    ],
)
async def test_an_answer_that_breaks_off_is_broken(sent: bytes) -> None:
    async with upstream_to(says(sent, then="close")) as upstream:
        heard = await ask(upstream).end()
        assert heard.broken is not None and not heard.broken.refused
        assert "ended the connection" in str(heard.broken)
        assert (heard.status, bytes(heard.body)) == (200, b"ab")


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "ended the connection"),
        (b"HTTP/1.1 200 O", "ended the connection"),
        (b"no HTTP at all\r\n\r\n", "is not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "is not HTTP"),
        (OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n", "is not HTTP"),
        (OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n", "is not HTTP"),
        (OK + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", "is not HTTP"),
        (OK + b"x-a: %b\r\n" % (b"a" * 1000) * 100, "longer than 65,536 bytes"),
        (OK + b"x-a: " + b"a" * 2 * MAX_HEAD_BYTES, "longer than 65,536 bytes"),
    ],
    ids=[
        "nothing",
        "half a line",
        "something else",
        "upgrade",
        "two lengths",
        "two framings",
        "no chunk",
        "many",
        "long",
    ],
)
async def test_what_is_no_answer_is_broken_and_not_asked_for_again(sent: bytes, why: str) -> None:
    asked = 0

    async def speak(peer: Peer) -> None:
        nonlocal asked
        await peer.request()
        asked += 1
        await peer.say(sent)

    async with upstream_to(speak) as upstream:
        heard = await ask(upstream).end()
        assert heard.broken is not None and why in str(heard.broken)
        assert not heard.broken.refused
        assert asked == 1 and len(upstream.idle) == 0


@pytest.mark.parametrize("more", [OK + b"content-length: 4\r\n\r\nevil", b"garbage\r\n\r\n", b"\x00"])
async def test_what_follows_an_answer_is_never_taken_for_part_of_it(more: bytes) -> None:
    async with upstream_to(says(OK + b"content-length: 2\r\n\r\nok" + more)) as upstream:
        for _ in range(2):
            heard = await ask(upstream).end()
            assert (heard.status, bytes(heard.body), heard.broken) == (200, b"ok", None)
            assert heard.calls.count("answered") == 1
            assert len(upstream.idle) == 0  # nobody knows what else would come there


async def test_unrequested_bytes_close_an_idle_connection() -> None:
    told = asyncio.Event()

    async def speak(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + b"content-length: 2\r\n\r\nok")
        await told.wait()
        await peer.say(OK + b"content-length: 4\r\n\r\nevil")
        await peer.gone()

    async with upstream_to(speak) as upstream:
        await ask(upstream).end()
        told.set()
        await until(lambda: len(upstream.idle) == 0, "the connection is given up")
        assert (await ask(upstream).end()).body == b"ok"


# ---- connections


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    waiting: list[Peer] = []

    async def speak(peer: Peer) -> None:
        while True:
            await peer.request()
            waiting.append(peer)
            await until(lambda: len(waiting) >= 5, "all have asked")
            await peer.say(OK + b"content-length: 1\r\n\r\n%d" % peer.number)

    async with upstream_to(speak) as upstream:
        answers = [await heard.end() for heard in [ask(upstream) for _ in range(5)]]
        assert sorted(bytes(heard.body) for heard in answers) == [b"0", b"1", b"2", b"3", b"4"]
        assert len(upstream.idle) == 5


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_connection_that_the_replica_closed_while_it_idled_costs_nothing(how: str) -> None:
    async def speak(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + b"content-length: 1\r\n\r\n%d" % peer.number)
        if peer.number == 0:
            await peer.request()  # it comes, and is not answered: as if the close had crossed it
            if how == "reset":
                peer.writer.transport.abort()
            return
        await peer.gone()

    async with upstream_to(speak) as upstream:
        assert (await ask(upstream).end()).body == b"0"
        assert len(upstream.idle) == 1
        heard = await ask(upstream).end()
        assert (bytes(heard.body), heard.calls) == (b"1", ["answered", "complete"])


async def test_without_a_length_a_reset_is_not_the_end_of_the_answer() -> None:
    heard: Heard

    async def speak(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + b"\r\n", b"half")
        await until(lambda: heard.body == b"half", "it has come")
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.writer.transport.abort()

    async with upstream_to(speak) as upstream:
        heard = ask(upstream)
        await heard.end()
        assert heard.broken is not None and not heard.broken.refused
        assert "complete" not in heard.calls


@pytest.mark.parametrize(
    ("second", "resend", "times"),
    [(b"", True, 3), (b"", False, 2), (b"HTTP/1.1 2", True, 2)],
    ids=["once more and no more", "not twice", "begun"],
)
async def test_a_request_that_a_reused_connection_loses_is_sent_again_if_it_may(
    second: bytes, resend: bool, times: int
) -> None:
    asked = 0

    async def speak(peer: Peer) -> None:
        nonlocal asked
        while True:
            await peer.request()
            asked += 1
            if asked > 1:
                await peer.say(second)
                return
            await peer.say(OK + b"content-length: 1\r\n\r\n0")

    async with upstream_to(speak) as upstream:
        await ask(upstream).end()
        heard = await ask(upstream, resend=resend).end()
        assert heard.calls == ["broke"] and heard.broken is not None and not heard.broken.refused
        assert asked == times


async def test_what_must_not_arrive_twice_takes_no_connection_that_may_be_closed_by_now() -> None:
    async def speak(peer: Peer) -> None:
        await says(OK + b"content-length: 1\r\n\r\n%d" % peer.number)(peer)

    async with upstream_to(speak) as upstream:
        await ask(upstream).end()
        assert (await ask(upstream, resend=False).end()).body == b"0"
        upstream.idle[0].idle_since_s -= 2 * SURE_IDLE_S
        assert (await ask(upstream, resend=False).end()).body == b"1"
        assert len(upstream.idle) == 2
        upstream.idle.rotate()  # the old one is good for others
        assert (await ask(upstream).end()).body == b"0"


async def test_a_machine_that_lost_its_power_is_noticed() -> None:
    async with upstream_to(begin) as upstream:
        heard = ask(upstream)
        await until(lambda: heard.body, "it has begun")
        connection = heard.sending.connection
        assert connection is not None
        connected = connection.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name, value in KEEPALIVE.items():
            assert connected.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
        heard.sending.cancel()


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b", "x" * 70])
async def test_a_refused_connection_is_known_not_to_have_reached_the_replica(host: str) -> None:
    upstream = Upstream(Target(host, refused_port(), False, ""))
    heard = await ask(upstream).end()
    assert heard.broken is not None and heard.broken.refused
    upstream.close()


async def test_a_replica_that_takes_no_connection_is_not_waited_for() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        upstream = Upstream(Target("127.0.0.1", port, False, ""), connect_timeout_s=0.05)
        heard = await ask(upstream).end()
        assert heard.broken is not None and heard.broken.refused
        assert "no connection within 0.05 s" in str(heard.broken)
        upstream.close()
        for filler in fillers:
            filler.close()


# ---- what the router does meanwhile


async def begin(peer: Peer) -> None:
    await peer.request()
    await peer.say(OK + b"content-length: 100\r\n\r\nbegun")
    await peer.gone()


async def test_cancelling_closes_the_connection_and_says_nothing_more() -> None:
    left = asyncio.Event()

    async def speak(peer: Peer) -> None:
        await begin(peer)
        left.set()

    async with upstream_to(speak) as upstream:
        heard = ask(upstream)
        await until(lambda: heard.body, "it has begun")
        heard.sending.cancel()
        heard.sending.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await left.wait()
        assert "broke" not in heard.calls
        assert not upstream.sendings and not upstream.idle


async def test_cancelling_before_the_connection_is_there_sends_nothing() -> None:
    asked = []

    async def speak(peer: Peer) -> None:
        asked.append(await peer.request())

    async with upstream_to(speak) as upstream:
        heard = ask(upstream)
        heard.sending.cancel()
        await until(lambda: not upstream._opening, "the connection was tried")
        assert heard.calls == [] and asked == []


async def test_cancelling_from_within_a_callback_ends_it() -> None:
    class Leaving(Heard):
        def received(self, body: bytes, complete: bool) -> None:
            super().received(body, complete)
            self.sending.cancel()

    async with upstream_to(begin) as upstream:
        heard = Leaving()
        heard.sending = upstream.send(REQUEST, heard)
        await until(lambda: heard.sending.over, "it was cancelled")
        assert heard.calls == ["answered", "received"]


async def test_a_paused_sending_reads_no_further_until_it_is_resumed() -> None:
    size = 30_000_000  # more than the buffers of both sockets
    written = 0

    async def speak(peer: Peer) -> None:
        nonlocal written
        await peer.request()
        await peer.say(OK + b"content-length: %d\r\n\r\n" % size)
        while written < size:
            await peer.say(bytes(100_000))
            written += 100_000
        await peer.gone()

    async with upstream_to(speak) as upstream:
        heard = ask(upstream)
        await until(lambda: heard.body, "it has begun")
        heard.sending.pause()
        seen = -1

        def stalled() -> bool:
            nonlocal seen
            before, seen = seen, written
            return before == seen

        await until(stalled, "the replica is stopped")
        had = len(heard.body)
        assert written < size
        heard.sending.resume()
        assert len((await heard.end()).body) == size > had


async def test_a_connection_that_was_paused_serves_the_next_request() -> None:
    class Full(Heard):
        def received(self, body: bytes, complete: bool) -> None:
            self.sending.pause()  # as a client that is full does at the last byte
            super().received(body, complete)

    async with upstream_to(says(OK + b"content-length: 2\r\n\r\nok")) as upstream:
        for _ in range(3):
            heard = Full()
            heard.sending = upstream.send(REQUEST, heard)
            await heard.end()
            heard.sending.resume()


async def test_a_sending_that_is_paused_before_it_is_connected_waits() -> None:
    asked = asyncio.Event()

    async def speak(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + b"content-length: 2\r\n\r\nok")
        asked.set()
        await peer.gone()

    async with upstream_to(speak) as upstream:
        heard = ask(upstream)
        heard.sending.pause()
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
        assert heard.calls == []
        heard.sending.resume()
        assert (await heard.end()).body == b"ok"
        heard.sending.pause()
        heard.sending.resume()


async def test_breaking_all_tells_every_listener_and_closes_every_connection() -> None:
    left = 0

    async def speak(peer: Peer) -> None:
        nonlocal left
        await begin(peer)
        left += 1

    async with upstream_to(speak) as upstream:
        asked = [ask(upstream) for _ in range(3)]
        await until(lambda: all(heard.body for heard in asked), "all have begun")
        connecting = ask(upstream)
        upstream.break_all("it is silent")
        for heard in (*asked, connecting):
            assert str((await heard.end()).broken) == "it is silent"
            assert heard.calls.count("broke") == 1
        await until(lambda: left == 3, "the replica's connections are closed")


async def test_idle_connections_are_closed_after_a_while_the_oldest_first() -> None:
    async with upstream_to(says(OK + b"content-length: 2\r\n\r\nok")) as upstream:
        for heard in [ask(upstream) for _ in range(3)]:
            await heard.end()
        since_s = asyncio.get_running_loop().time()
        for age, connection in enumerate(upstream.idle):
            connection.idle_since_s = since_s + age
        upstream.sweep(since_s + IDLE_LIMIT_S)
        assert len(upstream.idle) == 3
        upstream.sweep(since_s + IDLE_LIMIT_S + 1.5)
        assert len(upstream.idle) == 1
        upstream.sweep(since_s + IDLE_LIMIT_S + 2.5)
        assert len(upstream.idle) == 0
        assert (await ask(upstream).end()).body == b"ok"
