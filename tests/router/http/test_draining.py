"""A router that shuts down first sends clients elsewhere, and then refuses new requests."""

import asyncio
from typing import Any

import pytest

from tests.router.loopback import until
from tests.router.scripted import CHAT, DONE, Call, Client, Script, chat, connect, event, says, served

GOOD = b'{"choices":[]}'


async def test_a_router_that_leaves_is_not_ready_and_takes_requests_anyway() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, connect(running.port) as early:
        assert (await early.post(CHAT, chat())).headers.get("connection") is None
        running.front.leave()
        async with connect(running.port) as late:
            for client in (early, late):
                answer = await client.post(CHAT, chat())
                assert (answer.status, answer.body, answer.headers["connection"]) == (200, GOOD, "close")
                assert await client.rest() == b""  # it was closed


@pytest.mark.parametrize(
    ("path", "status"), [("/ready", 503), ("/health", 200), ("/v1/models", 200), ("/nowhere", 404)]
)
async def test_whatever_is_asked_of_a_router_that_leaves_is_the_last_of_its_connection(path: str, status: int) -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, connect(running.port) as client:
        running.front.leave()
        answer = await client.get(path)
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert await client.rest() == b""
        if path == "/ready":
            assert answer.error["message"] == "the router is about to end"


class Slowly:
    """Streams whose second half comes on a test's command."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        call.begin()
        call.chunk(event("a"))
        await self.go_on.wait()
        call.chunk(event("b") + DONE)
        call.end()

    async def begun(self, client: Client) -> None:
        client.send("POST", CHAT, chat(stream=True))
        status, headers = await client.head()
        assert (status, headers.get("connection")) == (200, None)
        assert await client.chunk() == event("a")

    async def ended(self, client: Client) -> None:
        self.go_on.set()
        assert [part async for part in client.chunks()] == [event("b") + DONE]


async def test_a_late_notice_comes_with_the_next_answer() -> None:
    """To close its connection after a stream that promised to keep it would cross with its next request."""
    slowly = Slowly()
    script = Script(slowly, says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        await slowly.begun(client)
        running.front.leave()
        await slowly.ended(client)
        assert (await client.post(CHAT, chat())).headers["connection"] == "close"
        assert await client.rest() == b""


async def test_a_worker_that_is_joined_divides_limits_and_clients_connect_again() -> None:
    slowly = Slowly()
    limits: dict[str, Any] = {"queue_size": 3, "max_connections": 3}
    limits |= {"max_body_bytes": 10**6, "max_bodies_bytes": 3 * 10**6}
    async with served(*Script(slowly, says(GOOD)).replicas(1), **limits) as running, connect(running.port) as early:
        await slowly.begun(early)
        running.front.divide(4)
        assert running.router.waiting.capacity == 1
        assert running.router.bodies.limit_bytes == 10**6, "one body fits"
        await slowly.ended(early)
        assert (await early.post(CHAT, chat())).headers["connection"] == "close"
        assert await early.rest() == b""
        async with connect(running.port) as late:
            assert (await late.post(CHAT, chat())).headers.get("connection") is None
            async with connect(running.port) as beyond:
                assert (await beyond.get("/health")).headers["connection"] == "close", "it is a spare one"


async def test_a_request_that_waits_for_its_answer_is_told_with_it() -> None:
    answer_now = asyncio.Event()

    async def late(call: Call) -> None:
        await answer_now.wait()
        call.answer(GOOD)

    async with served(*Script(late).replicas(1)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat())
        await running.opened(1)
        running.front.leave()
        answer_now.set()
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.rest() == b""


async def test_a_stream_that_outlasts_the_delay_ends_whole_and_its_connection_with_it() -> None:
    slowly = Slowly()
    async with served(*Script(slowly).replicas(1), drain_delay_s=0.01) as running, connect(running.port) as client:
        await slowly.begun(client)
        drained = asyncio.create_task(running.front.drain(60))
        await until(lambda: running.router.lifecycle.draining, "it takes nothing more")
        await slowly.ended(client)
        assert await client.rest() == b""
        assert await drained == 0


async def test_after_that_idle_connections_are_closed_and_new_ones_refused() -> None:
    replicas = Script(says(GOOD)).replicas(1)
    async with served(*replicas, drain_delay_s=0.01) as running, connect(running.port) as idle:
        await idle.post(CHAT, chat())
        async with connect(running.port) as new:
            await until(lambda: len(running.front.server.connections.open) == 2, "both are connected")
            assert await running.front.drain(60) == 0
            assert await idle.rest() == await new.rest() == b""
        async with connect(running.port) as late:
            refusal = await late.post(CHAT, chat())
            assert (refusal.status, refusal.error["code"]) == (503, "draining")
