"""Many concurrent streams through a router; each must have the same bytes despite any fault."""

import asyncio
import time
from collections import Counter
from typing import Any, NamedTuple

import httpx2

from tests.chaos.routers import RouterProcess, events_in, without_chance
from tests.events.processes import DEADLINE_S
from tests.replica.serving import MODEL

STREAMS = 64
TOKENS = 90  # a stream takes 3 s: a busy machine needs one from the first that is halfway to the last
PACE = (
    *("--set=simulated_prefill_tokens_per_s=200_000", "--set=simulated_decode_tokens_per_s=30"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0"),
)


def asked(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "seed": number, "ignore_eos": True, "stream": True}
    if number % 4 == 1:
        body |= {"n": 2}
    if number % 4 == 2:
        body |= {"stream_options": {"include_usage": True}}
    body |= fields
    text = f"Once upon a time there were {number} replicas. " * (1 + number % 5)
    if number % 2:
        return "/v1/completions", body | {"prompt": text}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}


class Told(NamedTuple):
    status: int
    body: bytes
    replica: str
    took_s: float
    longest_pause_s: float

    @property
    def lines(self) -> list[bytes]:
        """Events of the stream; with two choices, grouped by choice, because their interleaving depends on timing."""
        events = without_chance(self.body).split(b"\n\n")
        return (
            sorted(events, key=lambda event: event[event.find(b'"index":') :][:9])
            if b'"index":1' in self.body
            else events
        )


async def stream(
    http: httpx2.AsyncClient, number: int, halfway: asyncio.Semaphore | None = None, **fields: Any
) -> Told:
    """Read one stream; `halfway` is released once, after a third of it or at its end."""
    path, body = asked(number, **fields)
    began_s = last_s = time.monotonic()
    pause_s, heard, events = 0.0, bytearray(), 0
    async with http.stream("POST", path, json=body) as response:
        async for piece in response.aiter_raw():
            heard += piece
            now_s = time.monotonic()
            pause_s, last_s = max(pause_s, now_s - last_s), now_s
            events += piece.count(b"data: ")
            if halfway is not None and events > TOKENS // 3:
                halfway.release()
                halfway = None
    if halfway is not None:
        halfway.release()
    replica = response.headers.get("x-warmroute-replica", "")
    return Told(response.status_code, bytes(heard), replica, last_s - began_s, pause_s)


async def all_streams(http: httpx2.AsyncClient, halfway: asyncio.Semaphore | None = None) -> list[Told]:
    async with asyncio.timeout(4 * DEADLINE_S):
        return await asyncio.gather(*(stream(http, number, halfway) for number in range(STREAMS)))


async def streams_halfway(http: httpx2.AsyncClient) -> asyncio.Task[list[Told]]:
    """Start all streams and return when each is in its midst, however fast this machine is."""
    halfway = asyncio.Semaphore(0)
    streams = asyncio.create_task(all_streams(http, halfway))
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(STREAMS):
            await halfway.acquire()
    return streams


def check_same(told: list[Told], undisturbed: list[Told]) -> None:
    for number, (one, other) in enumerate(zip(told, undisturbed, strict=True)):
        assert one.status == 200, one
        events_in(one.body)
        assert one.lines == other.lines, f"stream {number}, begun by {one.replica}"


def resumes_of(served: RouterProcess) -> Counter[str]:
    decisions = served.decisions()
    return Counter(
        retries=sum(one["retries"] for one in decisions),
        resumes=sum(one["resumes"] for one in decisions),
        resumed=sum(one["resumes"] > 0 for one in decisions),
    )


async def unblocked(function: Any, *arguments: Any, **options: Any) -> Any:
    return await asyncio.to_thread(function, *arguments, **options)
