"""Answers that an engine gives up, though they look complete: vLLM at SIGTERM, /sleep and /pause."""

import asyncio
import json
from typing import Any

import pytest

from api.generation_apis import CHAT as CHAT_API
from router.proxy.streams.events import SentEvents
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    Call,
    Handler,
    Script,
    Served,
    chat,
    connect,
    event,
    says,
    served,
)

pytestmark = pytest.mark.virtual

GOOD = b'{"choices":[{"index":0,"message":{"content":"\\"finish_reason\\":\\"abort\\""},"finish_reason":"stop"}]}'
GIVEN_UP = GOOD.replace(b'"stop"', b'"abort"')


def faults(running: Served) -> int:
    return sum(member.server.faults for member in running.router.members)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return chat(**fields) if path == CHAT else {"model": "m", "prompt": "hi", **fields}


def said(text: str, finish: str | None = None) -> bytes:
    return event(json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}))


def streams(*pieces: bytes) -> Handler:
    def handle(call: Call) -> None:
        call.begin()
        for piece in pieces:
            call.chunk(piece)
        call.end()

    return handle


WHOLE = (said("a"), said("b"), said("", "stop"), DONE)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_whole_answer_that_was_given_up_is_given_again_by_another_replica(path: str) -> None:
    script = Script(says(GIVEN_UP), says(GOOD))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        answer = await client.post(path, body_of(path))
        assert (answer.status, answer.body) == (200, GOOD)
        assert len(script.calls) == 2 and faults(running) == 1


async def test_an_answer_that_every_replica_gives_up_is_an_error() -> None:
    script = Script(says(GIVEN_UP))
    async with served(*script.replicas(3)) as running, connect(running.port) as client:
        answer = await client.post(CHAT, chat())
        assert answer.status == 503 and "3 replicas" in answer.error["message"]
        assert len(script.calls) == 3


async def test_a_stream_that_was_given_up_before_its_first_event_begins_at_another_replica() -> None:
    script = Script(streams(said("", "abort"), DONE), streams(*WHOLE))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat(stream=True))).body == b"".join(WHOLE)
        assert len(script.calls) == 2 and faults(running) == 1


@pytest.mark.virtual(False)
@pytest.mark.parametrize("cut", [0, 1, 60, said("", "abort").index(b"abort") + 2])
async def test_a_stream_that_is_given_up_after_many_reads_ends_in_an_error(cut: int) -> None:
    events, last = [said(f"word {number} " * 3) for number in range(5)], said("", "abort") + said("too late " * 9)
    passed_on = [*events, last[:cut]] if cut else events
    heard = asyncio.Semaphore(0)

    async def handle(call: Call) -> None:
        call.begin()
        for piece in passed_on:
            call.chunk(piece)
            await heard.acquire()  # the client has it before the router reads more
        call.chunk(last[cut:])
        await call.left()

    script = Script(handle)
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        await client.head()
        for piece in passed_on:
            assert await client.chunk() == piece
            heard.release()
        *_, error, done, end = b"".join([part async for part in client.chunks()]).split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "broken_stream"
        assert (done, end) == (b"data: [DONE]", b"") and faults(running) == 1
        [used] = (await client.get("/usage", host="localhost")).json["usage"]
        assert used["generated_tokens"] == len(events)


@pytest.mark.parametrize("after", [(), (said("a"),)], ids=["at once", "in its midst"])
async def test_what_only_looks_like_it_is_passed_on(after: tuple[bytes, ...]) -> None:
    text = said('"finish_reason":"abort"') + said("abort") + said("abort", "stop")
    script = Script(streams(*after, text, DONE))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat(stream=True))).body == b"".join((*after, text, DONE))
        assert faults(running) == 0


@pytest.mark.parametrize(("code", "asked"), [(500, 2), (503, 2), (400, 1)])
async def test_a_stream_that_is_an_error_of_the_engine_begins_at_another_replica(code: int, asked: int) -> None:
    error = event(json.dumps({"error": {"message": "Generation is paused.", "code": code}}))
    script = Script(streams(error, DONE), streams(*WHOLE))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        answer = await client.post(CHAT, chat(stream=True))
        assert len(script.calls) == asked
        assert answer.body == (b"".join(WHOLE) if asked == 2 else error + DONE)


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_the_events_before_the_one_that_gives_up_are_whole(ends: bytes) -> None:
    good, last = (one.replace(b"\n", ends) for one in (said("a"), said("", "abort")))
    stream = good + last
    for cut in range(len(stream)):
        sent = SentEvents(CHAT_API)
        sent.end = stream[:cut]
        assert stream[:cut] + (sent.before_abort(stream[cut:]) or b"") == stream[: max(cut, len(good))], cut
    assert SentEvents(CHAT_API).before_abort(good) is None
