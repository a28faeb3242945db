"""Routers that tell each other, by real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from events.sockets.curve import CurveClient, load_curve_client, secure_client, write_keys
from router.placement.placement import Placement
from router.workers.peer_links import TOPIC, Links
from tests.router.loopback import until
from tests.router.scripted import CHAT, COMPLETIONS, MODEL, Scripted, Served, chat, connect, says, served, silent, up
from tests.router.workers.places import places

ANY = "tcp://127.0.0.1:0"


def endpoint(running: Served) -> str:
    links = running.front.links
    assert links is not None
    return links.endpoint


def in_flight(running: Served, name: str = "r0") -> tuple[int, int]:
    candidate = running.member(name).candidate
    return candidate.in_flight, candidate.all_in_flight


def hears(running: Served) -> int:
    assert running.front.links is not None
    peers: dict[int, Any] = running.front.links.inbox.peers
    return len(peers)


@asynccontextmanager
async def pair(replica: Scripted, **config: Any) -> AsyncIterator[tuple[Served, Served]]:
    """Two routers, the second of which hears the first."""
    async with (
        served(replica, peer_listen=ANY, **config) as one,
        served(replica, peer_listen=ANY, peers=(endpoint(one),), **config) as other,
    ):
        await until(lambda: hears(other) == 1, "it is heard")
        assert other.router.placement.outbox is None, "nobody listens to it"
        yield one, other


@asynccontextmanager
async def workers(
    *replicas: Scripted, folder: Path, heard: int = 1, **config: Any
) -> AsyncIterator[tuple[Served, Served]]:
    """Two workers of one router, each of which hears so many others."""
    [first, second] = places(2, folder)
    async with served(*replicas, place=first, **config) as one, served(*replicas, place=second, **config) as other:
        await until(lambda: hears(one) == hears(other) == heard, "they are heard")
        yield one, other


def is_let_in(at: str, client: CurveClient | None) -> bool:
    """Return whether a subscriber with these keys gets in."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        if client is not None:
            secure_client(socket, client)
        socket.subscribe(b"")
        socket.connect(at)
        assert monitor.poll(10_000), "nothing happens"
        found = parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        socket.disable_monitor()
        monitor.close()
        return found
    finally:
        context.destroy(linger=0)


async def test_a_request_to_a_replica_that_came_later_counts_at_the_other_router() -> None:
    late = Scripted("r1", silent, native=True)
    async with late.running(), pair(Scripted("r0", silent, native=True)) as (one, other):
        for running in (one, other):
            running.member("r0").health.drain()
            running.front.upkeep.add(late.spec)
            await until(partial(up, running.front, {"r1": late}), "it takes requests")
        async with connect(one.port) as client:
            client.send("POST", CHAT, chat())
            await until(lambda: in_flight(other, "r1") == (0, 1), "the other counts it")


async def test_a_request_at_one_router_counts_at_the_other_while_it_runs() -> None:
    async with pair(Scripted("r0", silent, native=True)) as (one, other):
        async with connect(one.port) as client:
            client.send("POST", CHAT, chat())
            await until(lambda: in_flight(other) == (0, 1), "the other counts it")
            assert in_flight(one) == (1, 1)
            assert not hears(one), "nobody told it of the other"
        await until(lambda: in_flight(other) == (0, 0), "it has ended")
        assert other.front.links is not None and other.front.links.inbox.counts.requests == 1


async def test_a_request_waits_for_its_routers_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(Scripted("r0", says(), native=True)) as (one, _), connect(one.port) as client:
        await until(lambda: one.router.placement.outbox is not None, "it is listened to")
        asked: list[int] = []

        def pause_s(candidates: Sequence[Any]) -> float:
            asked.append(len(candidates))
            return 0.05

        monkeypatch.setattr(one.router.placement, "pause_s", pause_s)
        began_s = one.router.now_s()
        assert (await client.post(CHAT, chat())).status == 200
        assert one.router.now_s() - began_s >= 0.05
        assert asked == [1]
        async with connect(one.port) as hasty:
            hasty.send("POST", CHAT, chat())
            await until(lambda: len(asked) == 2, "it waits for its turn")
        await one.idle()
        assert one.router.history.decisions[-1].outcome.status == 200, "nothing was chosen for a client that has left"
        assert len(one.router.history.decisions) <= 2


@pytest.mark.parametrize("are_workers", [False, True])
async def test_requests_wait_for_room_that_another_router_makes(are_workers: bool, tmp_path: Path) -> None:
    asked, release = [], asyncio.Event()

    async def answers(call: Any) -> None:
        asked.append(call)
        await release.wait()
        call.answer(b"{}")

    two = partial(workers, folder=tmp_path) if are_workers else pair
    async with (
        two(Scripted("r0", answers), replica_limit=1) as (one, other),
        connect(one.port) as first,
        connect(other.port) as second,
    ):
        first.send("POST", CHAT, chat())
        await until(lambda: in_flight(other) == (0, 1), "the other counts it")
        second.send("POST", CHAT, chat())
        await until(lambda: len(other.router.waiting) == 1, "it waits, as the replica is full")
        await until(lambda: len(asked) == 1, "the replica has got the first")
        release.set()
        assert (await first.answer()).status == (await second.answer()).status == 200


@pytest.mark.parametrize("are_workers", [False, True])
async def test_sessions_of_another_router_take_up_room_here(are_workers: bool, tmp_path: Path) -> None:
    replica, tokens = Scripted("r0", silent, native=True), 16 * 1024
    replica.control["/load"][1]["max_model_len"] = 10**6
    both = workers(replica, folder=tmp_path, policy="cost") if are_workers else pair(replica, policy="cost")
    async with AsyncExitStack() as stack:
        one, other = await stack.enter_async_context(both)
        for running in (one, other):
            running.member("r0").block_size = 16
            running.router.members.arrange()
            running.member("r0").load.describe(16, 4 * tokens // 16)

        async def begin(at: Served, session: str) -> None:
            client = await stack.enter_async_context(connect(at.port))
            asked = {"model": MODEL, "prompt": f"{session:4}" + "x" * (tokens - 4)}
            client.send("POST", COMPLETIONS, asked, **{"x-session-id": session})

        for number in range(4):
            await begin(one, f"s{number}")
        here, there = (running.router.placement.working_sets[MODEL] for running in (one, other))
        await until(lambda: len(there.sessions) == 4, "the other knows of them")
        here.heard(1.0)  # as if it had found out
        await begin(one, "s1")
        await until(lambda: there.bound_tokens > 0, "it hears that they are too many")
        await begin(other, "s4")
        await until(lambda: (len(there.sessions), list(there.waiting)) == (4, ["/s4"]), "it would not fit")
        await begin(other, "s0")
        await until(lambda: in_flight(other) == (1, 6), "one that has begun goes on anywhere")


async def test_keys_let_in_only_those_that_have_them(tmp_path: Path) -> None:
    public, secret = write_keys(str(tmp_path / "ours"))
    _, other_secret = write_keys(str(tmp_path / "others"))
    async with pair(Scripted("r0", silent, native=True), peer_keys=str(secret)) as (one, _):
        ours, others = str(public), str(other_secret)
        assert await asyncio.to_thread(is_let_in, endpoint(one), load_curve_client(ours, str(secret)))
        assert not await asyncio.to_thread(is_let_in, endpoint(one), load_curve_client(ours, others))
        assert not await asyncio.to_thread(is_let_in, endpoint(one), None)


async def test_a_router_that_dies_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("router.workers.peer_inbox.SILENT_S", 0.3)
    monkeypatch.setattr("router.workers.peer_links.RUNNING_S", 0.05)
    monkeypatch.setattr("router.placement.outbox.RUNNING_S", 0.05)
    async with pair(Scripted("r0", silent, native=True)) as (one, other), connect(one.port) as client:
        client.send("POST", CHAT, chat())
        await until(lambda: in_flight(other) == (0, 1), "the other counts it")
        monkeypatch.setattr(one.front.links, "_tell", lambda: None)
        await until(lambda: in_flight(other) == (0, 0), "its request is forgotten")
        assert not hears(other)
    assert "peers heard: 1 (before: 0)" in caplog.text
    assert "peers heard: 0 (before: 1)" in caplog.text


async def test_workers_of_one_router_are_not_called_routers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with workers(Scripted("r0", silent), folder=tmp_path):
        assert "other workers heard: 1 (before: 0)" in caplog.text
    assert "router" not in "".join(one.message for one in caplog.records if "heard" in one.message)


async def test_workers_hear_each_other_and_routers_elsewhere(tmp_path: Path) -> None:
    replica = Scripted("r0", silent, native=True)
    async with (
        served(replica, peer_listen=ANY) as elsewhere,
        workers(replica, folder=tmp_path, peer_listen=ANY, peers=(endpoint(elsewhere),), heard=2) as (one, other),
        connect(elsewhere.port) as far,
        connect(one.port) as near,
    ):
        far.send("POST", CHAT, chat())
        await until(lambda: in_flight(one) == in_flight(other) == (0, 1), "both count what is sent elsewhere")
        near.send("POST", CHAT, chat())
        await until(lambda: in_flight(other) == (0, 2), "the other counts it, too")
        assert in_flight(one) == (1, 2)


async def test_what_a_worker_has_just_sent_counts_in_the_next_choice_of_another(tmp_path: Path) -> None:
    replicas = [Scripted(f"r{number}", says(b"{}")) for number in range(4)]
    async with workers(*replicas, folder=tmp_path, policy="cost") as both:
        for number in range(8):
            went = set()
            for worker in both:
                async with connect(worker.port) as client:
                    answer = await client.post(CHAT, chat(f"{number} " * 2000))
                    went.add(answer.headers["x-warmroute-replica"])
            assert len(went) == 1, "the second worker counts on the blocks that the first has ordered"


async def test_a_worker_knows_the_queue_that_another_has_made(tmp_path: Path) -> None:
    async with workers(Scripted("r0", silent, native=True), folder=tmp_path) as (one, other):
        async with connect(one.port) as client:
            client.send("POST", CHAT, chat())
            await until(lambda: in_flight(other) == (0, 1), "the other counts it")
            assert other.member("r0").candidate.queued_tokens == one.member("r0").candidate.queued_tokens > 0
        await until(lambda: in_flight(other) == (0, 0), "it has ended")


async def test_an_endpoint_that_is_taken_is_named() -> None:
    replica = Scripted("r0", silent)
    async with served(replica, peer_listen=ANY) as one:
        with pytest.raises(OSError, match=rf"--peer-listen {endpoint(one)}: .* in use; choose another endpoint"):
            Links(one.router.placement, lambda _: None, lambda: None, endpoint(one))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93\x01\x02\xa1x", b"\x81\xa1a\x01", bytes(1000), b"\x96" + b"\x91" * 5000],
)
async def test_what_cannot_be_read_is_counted_and_does_no_harm(payload: bytes) -> None:
    placement = Placement("cost", optimistic_ttl_s=1.0, first_token_timeout_s=1.0)
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    try:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        links = Links(placement, lambda _: None, lambda: None, ANY, [f"tcp://127.0.0.1:{port}"])
        task = asyncio.create_task(links.run())
        while not links.unreadable:
            socket.send_multipart((TOPIC, payload))
            await asyncio.sleep(0.01)
        socket.send_multipart((TOPIC, payload, payload))
        await until(lambda: links.unreadable > 1, "a message with too many parts is counted, too")
        assert not task.done()
        task.cancel()
        links.close()
    finally:
        context.destroy(linger=0)


async def test_names_that_are_not_found_are_looked_up_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.workers.peer_links.RUNNING_S", 0.01)
    monkeypatch.setattr("router.workers.peer_links.LOOK_UP_S", 0.01)
    loop = asyncio.get_running_loop()
    known, looks = loop.getaddrinfo, 0

    async def look_up(host: str, port: int, **more: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise OSError("no such name")
        return await known("127.0.0.1" if host == "routers.example" else host, port, **more)

    monkeypatch.setattr(loop, "getaddrinfo", look_up, raising=False)
    replica = Scripted("r0", silent, native=True)
    async with served(replica, peer_listen=ANY) as one:
        named = endpoint(one).replace("127.0.0.1", "routers.example")
        async with served(replica, peer_listen=ANY, peers=(named,)) as other:
            await until(lambda: hears(other) == 1, "it is found in the end")
    assert caplog.text.count("is not found: no such name") == 1
