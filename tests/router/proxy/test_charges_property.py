"""A key is charged what replicas of ours have computed, whatever its requests combine: by the replicas' own counts."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest

from router.members.spec import ReplicaSpec
from router.tenants.keys import keys_from_options
from router.tenants.limits import Use
from router.tenants.usage import Selection
from tests.replica.serving import MODEL, Replica, config
from tests.router.scripted import CHAT, COMPLETIONS, Client, Served, connect, served

KEY = "client-key"
AS_KEY = {"authorization": f"Bearer {KEY}"}
ALL = Selection("0000-01-01", "9999-12-31")
BLOCK = 16
ROUNDS, AT_ONCE = 5, 8
SETTLED_S = 5.0
WORDS = [f"{word} " * 10 for word in ("salt", "pepper", "thyme")]


class Real(NamedTuple):
    """A real replica, for `served`."""

    name: str
    port: int

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://127.0.0.1:{self.port}", engine="warmroute")


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    """One with a cache and one without, where each choice of a prompt computes it again."""
    started = [Replica(config(block_size=BLOCK, enable_prefix_caching=caches)) for caches in (True, False)]
    try:
        for one in started:
            one.wait_ready()
        yield started
    finally:
        for one in started:
            one.end(signal.SIGKILL)


def counted(replicas: list[Replica]) -> tuple[int, int]:
    """The prompt tokens that replicas have computed, and the tokens that they have generated."""
    computed = generated = 0.0
    for one in replicas:
        for line in one.get("/metrics").body.decode().splitlines():
            name, _, value = line.rpartition(" ")
            computed += float(value) if name.startswith("warmroute:computed_prompt_tokens_total") else 0
            generated += float(value) if name.startswith("vllm:generation_tokens_total") else 0
    return round(computed), round(generated)


def text_of(chance: random.Random) -> str:
    return "".join(chance.choice(WORDS) for _ in range(chance.randrange(1, 6)))[: chance.randrange(1, 250)]


def body_of(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A request that combines what may change what it costs."""
    path = chance.choice([COMPLETIONS, COMPLETIONS, CHAT, "/v1/messages", "/v1/responses"])
    body: dict[str, Any] = {"model": MODEL, "max_tokens": chance.randrange(1, 12), "stream": chance.random() < 0.5}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
        return path, body | {"input": text_of(chance)}
    if path == "/v1/messages":
        return path, body | {"messages": [{"role": "user", "content": text_of(chance)}]}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": text_of(chance)}]
    elif chance.random() < 0.4:
        body["prompt"] = text_of(chance)
    else:
        body["prompt"] = [text_of(chance) for _ in range(chance.randrange(1, 6))]
        if chance.random() < 0.3:
            body["prompt"] = [list(text.encode()) for text in body["prompt"]]
    if chance.random() < 0.4:
        body["n"] = chance.randrange(1, 4)
    if path == COMPLETIONS and chance.random() < 0.3:
        body["echo"] = True
    if not body["stream"] and chance.random() < 0.2:
        body["prompt_logprobs"] = 1
    if chance.random() < 0.2:
        body["stop"] = ["a", "e"]
    if chance.random() < 0.2:
        body["resume_token_ids"] = [[97] * 9]  # only a router may say that
    return path, body


async def used(running: Served) -> Use:
    [row] = await running.router.ledger.unsaved(ALL)
    counts = row.counts
    return Use(counts.requests, counts.computed_tokens, counts.cached_tokens, counts.generated_tokens)


async def settled(
    replicas: list[Replica], before: tuple[int, int], expected: tuple[int, int], within_s: float = SETTLED_S
) -> tuple[int, int]:
    """Wait until replicas have counted what is expected, and return their counts; engines tell them now and then."""
    found = (-1, -1)
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while found != expected:
                await asyncio.sleep(0.01)
                now = counted(replicas)
                found = now[0] - before[0], now[1] - before[1]
    return found


async def ask(client: Client, path: str, body: dict[str, Any]) -> None:
    answer = await client.post(path, body, **AS_KEY)
    assert answer.status == 200, (body, answer.body)


async def leave(client: Client, path: str, body: dict[str, Any], chunks: int) -> None:
    """Ask for a stream, and leave it after so many pieces; before its head if there are none."""
    client.send("POST", path, body | {"stream": True}, **AS_KEY)
    if chunks:
        assert (await client.head())[0] == 200
    for _ in range(chunks):
        if not await client.chunk():
            break
    client.leave()


@asynccontextmanager
async def router(replicas: list[Replica], *, tokenizes: bool) -> AsyncIterator[Served]:
    [key] = keys_from_options([KEY], None)
    ours: Any = [Real(f"r{number}", one.port) for number, one in enumerate(replicas)]
    async with served(*ours, keys=(key,), demand_key=True) as running:
        if not tokenizes:
            for model in running.router.members.models.values():
                model.tokens.go_approximate("for this test")
        yield running


@pytest.mark.parametrize("tokenizes", [True, False], ids=["exact", "approximate"])
async def test_what_is_charged_is_what_replicas_have_computed(replicas: list[Replica], tokenizes: bool) -> None:
    chance = random.Random(7)
    before = counted(replicas)
    async with router(replicas, tokenizes=tokenizes) as running, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(running.port)) for _ in range(AT_ONCE)]
        for _ in range(ROUNDS):
            await asyncio.gather(*(ask(client, *body_of(chance)) for client in clients))
        await running.idle()
        charged = await used(running)
    assert charged.requests == ROUNDS * AT_ONCE
    assert await settled(replicas, before, (charged.computed, charged.generated)) == charged[1::2]


async def test_whoever_leaves_is_charged_no_less_than_was_computed(replicas: list[Replica]) -> None:
    chance = random.Random(8)
    before = counted(replicas)
    async with router(replicas, tokenizes=True) as running:
        for _ in range(ROUNDS * AT_ONCE):
            path, body = body_of(chance)
            body = {name: value for name, value in body.items() if name != "prompt_logprobs"}
            async with connect(running.port) as client:
                await leave(client, path, body, chance.randrange(4))
        await running.idle()
        for one in replicas:
            await asyncio.to_thread(one.wait_idle)
        charged = await used(running)
    computed, _ = await settled(replicas, before, (charged.computed, charged.generated), within_s=0.6)
    assert 0 < computed <= charged.computed + charged.cached
