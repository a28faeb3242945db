"""The router's own small requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.members.broken import Broken
from router.members.fetch import MAX_BYTES, fetch
from router.members.spec import Target
from router.members.upstream import Upstream
from tests.router.scripted import Handler, Script, Scripted, drops, says, silent


@asynccontextmanager
async def upstream_to(handler: Handler, path: str = "") -> AsyncIterator[tuple[Upstream, Scripted]]:
    async with Scripted("r", handler).running() as replica:
        upstream = Upstream(Target("127.0.0.1", replica.port, False, path))
        try:
            yield upstream, replica
        finally:
            upstream.close()


async def test_it_asks_and_answers() -> None:
    async with upstream_to(says(b"body", 201, x_own="1"), "/prefix") as (upstream, replica):
        fetched = await fetch(upstream, "/path", lines=b"authorization: Bearer k\r\n")
        assert (fetched.status, fetched.body) == (201, b"body") and (b"x-own", b"1") in fetched.headers
        [call] = replica.calls
        assert (call.method, call.target, call.body) == ("GET", "/prefix/path", b"")
        assert call.header("authorization") == "Bearer k"
        assert call.header("host") == f"127.0.0.1:{replica.port}"


async def test_with_a_body_it_is_a_post() -> None:
    async with upstream_to(says()) as (upstream, replica):
        await fetch(upstream, "/path", body=b'{"a":1}')
        [call] = replica.calls
        assert (call.method, call.json, call.header("content-type")) == ("POST", {"a": 1}, "application/json")


async def test_it_does_not_wait_for_ever() -> None:
    script = Script(silent)
    async with upstream_to(script) as (upstream, _):
        with pytest.raises(Broken, match=r"did not answer /x within 0\.05 s"):
            await fetch(upstream, "/x", timeout_s=0.05)
        async with asyncio.timeout(20):
            await script.calls[0].left()
        assert not upstream.sendings and not upstream.idle


@pytest.mark.parametrize("handler", [drops, says(bytes(2 * MAX_BYTES))], ids=["lost", "endless"])
async def test_what_is_lost_or_too_long_is_broken(handler: Handler) -> None:
    async with upstream_to(handler) as (upstream, _):
        with pytest.raises(Broken):
            await fetch(upstream, "/")
        assert not upstream.sendings


async def test_a_client_that_gives_up_leaves_nothing() -> None:
    script = Script(silent)
    async with upstream_to(script) as (upstream, _):
        asking = asyncio.create_task(fetch(upstream, "/"))
        async with asyncio.timeout(20):
            while not script.calls:
                await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(20):
            await script.calls[0].left()
        assert not upstream.sendings
