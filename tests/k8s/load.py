"""Clients that ask all the time, while pods come and go."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tests.router.loopback import until

CLIENTS = 12
SIMULATED = (
    *("--engine=simulated", "--set=simulated_decode_tokens_per_s=60", "--set=simulated_batch_slowdown=0"),
    *("--set=simulated_prefill_tokens_per_s=100000", "--log-level=warning"),
)


class Load:
    """Clients with connections that they keep; half of them stream."""

    def __init__(self, url: str) -> None:
        self.requests = 0
        self.failed: list[str] = []
        self._ending = False
        self._url = url

    async def run(self, number: int) -> None:
        async with httpx2.AsyncClient(base_url=self._url, timeout=30, trust_env=False) as http:
            while not self._ending:
                tokens = 90 if number % 2 else 15
                body = {"model": "demo", "prompt": f"Once upon a time, {number}", "max_tokens": tokens}
                try:
                    await self._ask(
                        http, body | {"ignore_eos": True, "stream": bool(number % 2), "return_token_ids": True}
                    )
                except (httpx2.HTTPError, AssertionError) as error:
                    self.failed.append(f"{type(error).__name__}: {error}")
                self.requests += 1

    @staticmethod
    async def _ask(http: httpx2.AsyncClient, body: dict[str, Any]) -> None:
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if body["stream"]:
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-200:]
            heard = token_ids(answer.text.splitlines())
            assert heard == body["max_tokens"], f"{heard} of {body['max_tokens']} tokens"

    def end(self) -> None:
        self._ending = True


def token_ids(lines: Iterable[str]) -> int:
    """The number of tokens in a stream; some have no text of their own."""
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return sum(len(each.get("token_ids") or ()) for piece in pieces for each in piece["choices"])


async def more_of(load: Load) -> None:
    enough = load.requests + 2 * CLIENTS
    await until(lambda: load.requests >= enough, "more requests have been answered")


@asynccontextmanager
async def under_load(url: str) -> AsyncIterator[Load]:
    load = Load(url)
    tasks = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
    try:
        await more_of(load)  # everybody has a connection, and streams run
        yield load
        await more_of(load)
    finally:
        load.end()
        await asyncio.gather(*tasks)
