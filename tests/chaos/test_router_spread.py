"""Placement of cold prompts, of a shared system prompt, and of a burst at two routers side by side."""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.chaos.replicas import until
from tests.chaos.routers import Fleet, fleet, http_client, router
from tests.replica.serving import MODEL

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

REPLICAS = 4
COLD = 100
MOST = 35
CLIENTS = 64
SHARED_TOKENS = 512
BURST = 120
IMBALANCE = 1.6
HELD_UP_S = 1.0  # shorter than a silence
LONG = 4000  # tokens: a fifth of a second, so a step that is held up is a sample that misleads, wherever it is held up
RATES = (
    *("--set=simulated_prefill_tokens_per_s=20_000", "--set=simulated_decode_tokens_per_s=400"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0"),
)
QUIET = ("--log-level", "error")


@pytest.fixture(scope="module")
def replicas() -> Iterator[Fleet]:
    """No two tests have a prompt in common."""
    with fleet(REPLICAS, *RATES) as started:
        yield started


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text, "max_tokens": 4, "seed": 1, "ignore_eos": True, **fields}


async def replica_of(http: httpx2.AsyncClient, asked: dict[str, Any]) -> str:
    answer = await http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    name: str = answer.headers["x-warmroute-replica"]
    return name


def cold(number: int, length: int = 300) -> str:
    return (f"{number:04d} is where this prompt begins, unlike any other. " * (length // 40 + 1))[:length]


async def test_a_replica_that_was_held_up_for_a_moment_gets_its_share_again(replicas: Fleet) -> None:
    with router(*replicas.as_options, *QUIET) as served:
        async with http_client(served.url) as http:
            long = [asyncio.create_task(replica_of(http, body(cold(500 + n, LONG)))) for n in range(6 * REPLICAS)]
            await until(lambda: replicas[0].load()["load"]["running"], "it computes one of them")
            replicas.signal(0, signal.SIGSTOP, http=False)
            try:
                await asyncio.wait(long, timeout=HELD_UP_S)
            finally:
                replicas.signal(0, signal.SIGCONT, http=False)
            assert "r0" in await asyncio.gather(*long)
            went = Counter([await replica_of(http, body(cold(600 + number))) for number in range(COLD)])
    print(sorted(went.values()))
    assert went["r0"] >= COLD / REPLICAS / 2, went


async def test_a_shared_system_prompt_does_not_pull_all_requests_to_one_replica(replicas: Fleet) -> None:
    system = cold(2000, SHARED_TOKENS)
    with router(*replicas.as_options, *QUIET) as served:
        async with http_client(served.url) as http:
            await replica_of(http, body(system))
            asked = [body(system + cold(number, 100 + 15 * (number % 40)), max_tokens=40) for number in range(CLIENTS)]
            went = Counter(await asyncio.gather(*(replica_of(http, one) for one in asked)))
    print(sorted(went.values()))
    assert len(went) == REPLICAS and max(went.values()) <= CLIENTS / 2, went


async def test_a_burst_at_two_routers_side_by_side_is_spread(replicas: Fleet) -> None:
    options = (*replicas.as_options, *QUIET)
    with router(*options) as left, router(*options) as right:
        async with http_client(left.url) as one, http_client(right.url) as other:
            prompts = [cold(3000 + number, 200 + 97 * number % 2400) for number in range(BURST)]
            went = await asyncio.gather(
                *(replica_of((one, other)[n % 2], body(prompt)) for n, prompt in enumerate(prompts))
            )
    tokens: Counter[str] = Counter()
    for name, prompt in zip(went, prompts, strict=True):
        tokens[name] += len(prompt)
    imbalance = max(tokens.values()) * REPLICAS / sum(tokens.values())
    print(f"imbalance {imbalance:.3f}: {sorted(tokens.values())} tokens")
    assert imbalance <= IMBALANCE
