"""Long requests wait for their turn; those whose clients leave never get one."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from api.errors import ApiError
from api.generation_apis import CHAT, COMPLETIONS
from api.http.bodies import Bodies
from api.native import REQUEST_TYPE, Native, envelope, pack_ids
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer
from replica.http.request_reader import INLINE_BYTES, THREADS, WAITING_BODIES, Reader

LONG = INLINE_BYTES + 1
LIMIT_S = 10.0


class Client:
    """A client as the server sees it: a body, and whether it has left."""

    def __init__(self, body: bytes = b"", content_type: str = "application/json", encoding: str = "identity") -> None:
        self.left = asyncio.Event()
        self._messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        headers = [(b"content-type", content_type.encode("latin-1")), (b"content-encoding", encoding.encode())]
        scope = {"type": "http", "headers": headers}
        self.request = Request(scope, self._receive)

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}


async def client_that_waits() -> Client:
    client = Client()
    await client.request.body()
    return client


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    made = Reader(Prompts(ByteTokenizer()), "demo", max_body_bytes=3 * LONG, bodies=Bodies(100 * LONG))
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()  # no thread outlives its test


async def busy(reader: Reader, gate: threading.Event) -> list[asyncio.Task[bool]]:
    """Every thread works until the gate is opened."""
    begun = threading.Semaphore(0)

    def work() -> bool:
        begun.release()
        return gate.wait(LIMIT_S)

    client = await client_that_waits()
    tasks = [asyncio.create_task(reader.aside(client.request, LONG, work)) for _ in range(THREADS)]
    for _ in tasks:
        assert await asyncio.to_thread(begun.acquire, timeout=LIMIT_S)
    return tasks


async def turns() -> None:
    """Lets every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_work_whose_client_leaves_in_the_queue_is_not_done(reader: Reader, gate: threading.Event) -> None:
    tasks = await busy(reader, gate)
    done: list[str] = []
    gone, patient = await client_that_waits(), await client_that_waits()
    dropped = asyncio.create_task(reader.aside(gone.request, LONG, lambda: done.append("gone")))
    kept = asyncio.create_task(reader.aside(patient.request, LONG, lambda: done.append("patient")))
    await turns()
    gone.left.set()
    gate.set()
    with pytest.raises(ClientDisconnect):
        await dropped
    await asyncio.gather(kept, *tasks)
    assert done == ["patient"]


async def test_only_so_many_bytes_may_wait(reader: Reader, gate: threading.Event) -> None:
    tasks = await busy(reader, gate)
    client = await client_that_waits()
    waiting = [
        asyncio.create_task(reader.aside(client.request, reader.max_body_bytes, lambda: None))
        for _ in range(WAITING_BODIES)
    ]
    await turns()
    with pytest.raises(ApiError) as caught:
        await reader.aside(client.request, LONG, lambda: None)
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
    assert await reader.aside(client.request, INLINE_BYTES, lambda: "short") == "short", "short prompts need no thread"
    gate.set()
    await asyncio.gather(*tasks, *waiting)
    assert await reader.aside(client.request, LONG, lambda: "again") == "again"


async def test_requests_waiting_for_a_closed_reader_are_refused(reader: Reader, gate: threading.Event) -> None:
    tasks = await busy(reader, gate)
    client = await client_that_waits()
    waiting = asyncio.create_task(reader.aside(client.request, LONG, lambda: None))
    await turns()
    reader.close()
    gate.set()
    with pytest.raises(ApiError) as caught:
        await waiting
    assert (caught.value.status, caught.value.code) == (503, "draining")
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("prompt", ["x" * 100, [1] * 100])
async def test_a_prompt_that_cannot_fit_is_refused(reader: Reader, prompt: Any) -> None:
    client = Client(json.dumps({"model": "demo", "prompt": prompt}).encode())
    with pytest.raises(ApiError) as caught:
        await reader.generation(client.request, COMPLETIONS, 100)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


async def test_a_compressed_body_is_refused(reader: Reader) -> None:
    with pytest.raises(ApiError) as caught:
        await reader.generation(Client(b"{}", encoding="gzip").request, COMPLETIONS, 100)
    assert (caught.value.status, caught.value.code) == (415, "content_encoding_unknown")
    assert reader.bodies.used_bytes == 0


async def test_a_routers_prompt_that_cannot_fit_is_refused(reader: Reader) -> None:
    body = envelope(Native(prompts=[pack_ids([1] * 100)])) + b'{"model": "demo", "prompt": "x"}'
    with pytest.raises(ApiError) as caught:
        await reader.generation(Client(body, REQUEST_TYPE).request, COMPLETIONS, 100)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("more", "taken"), [("", True), (" ;x=1", True), ("\x85", False), ("\xa0", False), ("\x0b", False)]
)
async def test_an_envelope_is_read_only_under_its_own_name(reader: Reader, more: str, taken: bool) -> None:
    body = envelope(Native(priority=-9.0)) + b'{"model": "demo", "prompt": "x"}'
    reading = reader.generation(Client(body, REQUEST_TYPE.upper() + more).request, COMPLETIONS, 100)
    if taken:
        assert (await reading).native.priority == -9.0
    else:
        with pytest.raises(ApiError, match="not valid JSON"):
            await reading


async def test_the_log_says_once_that_the_format_of_calls_is_not_known(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    with caplog.at_level(logging.WARNING):
        await reader.generation(Client(json.dumps(asked).encode()).request, CHAT, 1000)
        assert not caplog.records
        for _ in range(2):
            body = json.dumps(asked | {"tools": tools, "tool_choice": "auto"}).encode()
            await reader.generation(Client(body).request, CHAT, 1000)
    [record] = caplog.records
    assert "--tool-call-parser" in record.getMessage()
