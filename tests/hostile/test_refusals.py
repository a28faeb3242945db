"""A replica that refuses at once looks idle; it must not draw requests by that, and no client may see its refusals."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from tests.router.scripted import CHAT, QUEUE_FULL, Call, Handler, Scripted, chat, connect, says, served

REQUESTS = 100
CLIENTS = 8
GOOD = b'{"choices":[]}'
MAX_TO_THE_BAD_ONE = 20


async def works(call: Call) -> None:
    await asyncio.sleep(0.01)  # of computing
    call.answer(GOOD)


async def statuses(*replicas: Scripted) -> list[int]:
    """The statuses that clients get for one request after another."""
    found: list[int] = []
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(served(*replicas, policy="cost", health_interval_s=1.0))

        async def ask(count: int) -> None:
            async with connect(running.port) as client:
                for number in range(count):
                    found.append((await client.post(CHAT, chat(f"question {number}"))).status)

        await asyncio.gather(*(ask(REQUESTS // CLIENTS + 1) for _ in range(CLIENTS)))
    return found


@pytest.mark.parametrize(
    "refuses",
    [
        says(b'{"error":{"code":"rate_limit_exceeded"}}', 429),
        says(QUEUE_FULL, 429),
        says(b"overloaded", 503),
        says(b"out of memory", 500),
        says(b"<html>bad gateway</html>", 502),
    ],
    ids=["429", "queue full", "503", "500", "502"],
)
async def test_a_replica_that_refuses_at_once_gets_few_requests_and_no_client_sees_it(refuses: Handler) -> None:
    bad, good = Scripted("bad", refuses), Scripted("good", works)
    found = await statuses(bad, good)
    assert found == [200] * len(found)
    assert len(bad.calls) <= MAX_TO_THE_BAD_ONE, f"{len(bad.calls)} of {len(found)} requests went to the bad replica"


@pytest.mark.parametrize("status", [400, 429, 500])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_long_refusal_reaches_its_client_whole(path: str, status: int) -> None:
    """Too long to be searched for its reason, without another replica to ask."""
    reason = b"because " * 20_000
    async with served(Scripted("only", says(reason, status))) as running, connect(running.port) as client:
        answer = await client.post(path, chat("question"))
        assert (answer.status, answer.body) == (status, reason)


async def test_random_errors_of_every_replica_reach_no_client() -> None:
    chance = random.Random(0)

    async def now_and_then(call: Call) -> None:
        if chance.random() < 0.1:
            call.answer(b"cosmic ray", 500)
        else:
            await works(call)

    found = await statuses(*(Scripted(f"r{n}", now_and_then) for n in range(4)))
    assert found == [200] * len(found)
