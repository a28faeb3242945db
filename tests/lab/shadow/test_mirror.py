"""The app that takes copies of requests: bounds, and what is counted."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest

from lab.shadow.incoming import Mirror

CHAT = "/v1/chat/completions"
MAX_BODY, MOST, MAX_QUEUED = 100, 250, 3
WITHIN_S = 10.0


class Copies:
    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        self.mirror = Mirror(MAX_BODY, MOST, self.skipped, most_queued=MAX_QUEUED)


@asynccontextmanager
async def client(copies: Copies) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(copies.mirror)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shadow") as made:
        yield made


async def taken(copies: Copies) -> bytes:
    async with asyncio.timeout(WITHIN_S):
        return (await copies.mirror.take()).body


async def test_a_copy_is_answered_at_once_and_queued_with_its_headers() -> None:
    copies = Copies()
    async with client(copies) as http:
        waiting = asyncio.create_task(copies.mirror.take())
        headers = {"x-request-id": "i" * 200, "x-warmroute-replica": "r1", "x-session-id": "s"}
        assert (await http.post(CHAT, content=b"{}", headers=headers)).status_code == 204
        async with asyncio.timeout(WITHIN_S):
            copy = await waiting
    assert (copy.body, copy.path, copy.request_id, copy.replica) == (b"{}", CHAT, "i" * 128, "r1")
    assert (b"x-session-id", b"s") in copy.headers


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/embeddings"), ("GET", CHAT)])
async def test_requests_that_generate_nothing_are_answered_and_not_taken(method: str, path: str) -> None:
    copies = Copies()
    async with client(copies) as http:
        assert (await http.request(method, path, content=b"{}")).status_code == 204
        await http.post(CHAT, content=b"taken")
    assert await taken(copies) == b"taken"
    assert not copies.skipped


async def test_a_body_over_the_limit_is_counted() -> None:
    copies = Copies()
    async with client(copies) as http:
        answer = await http.post(CHAT, content=b"x" * (MAX_BODY + 1))
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert copies.skipped == {"too large": 1}


async def test_what_the_queue_has_no_room_for_is_counted() -> None:
    copies = Copies()
    async with client(copies) as http:
        for _ in range(4):
            assert (await http.post(CHAT, content=b"x" * MAX_BODY)).status_code == 204
        assert copies.skipped == {"no room": 2}
        await taken(copies)
        for _ in range(MAX_QUEUED):
            await http.post(CHAT, content=b"")
    assert copies.skipped == {"no room": 3}
    copies.mirror.end()
    assert copies.skipped == {"no room": 3, "left in the queue": MAX_QUEUED}
